"""Rewards that take as long as a judge elsewhere would: their time passes without using a core."""

import asyncio

from miles.types import Sample


async def wait_0(sample: Sample) -> float:
    return _score(sample)


async def wait_50(sample: Sample) -> float:
    await asyncio.sleep(0.05)
    return _score(sample)


async def wait_200(sample: Sample) -> float:
    await asyncio.sleep(0.2)
    return _score(sample)


def _score(sample: Sample) -> float:
    return float(sum(token % 2 for token in sample.response_ids))
