"""Plugs that take their time."""

import asyncio

from miles.protocols import GenerateCall
from miles.rollout.generate import single_turn
from miles.types import Sample

WAIT = 0.5


async def reward(sample: Sample) -> float:
    await asyncio.sleep(WAIT)
    return float(len(sample.response_ids) % 2)


async def generate(sample: Sample, call: GenerateCall) -> None:
    await single_turn(sample, call)
    await asyncio.sleep(WAIT)


calls = 0


async def stuck_reward(sample: Sample) -> float:
    """Answers for the first rollout only."""
    global calls
    calls += 1
    if calls > 16:
        await asyncio.sleep(3600)
    return float(calls % 2)


async def broken_reward(sample: Sample) -> float:
    raise KeyError("no such thing")
