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
