from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from miles.config.reward import RewardSection
from miles.rewards.reward import RewardScorer
from miles.types import Sample


@pytest.fixture
def answer() -> Callable[..., Sample]:
    def make(response: str, label: Any = "4", **fields: Any) -> Sample:
        return Sample(sample_index=3, group_index=1, prompt="2+2?", prompt_ids=[5], label=label, response=response, **fields)

    return make


@pytest.fixture
async def scorer() -> AsyncIterator[Callable[..., RewardScorer]]:
    made: list[RewardScorer] = []

    def make(reward: str, **settings: Any) -> RewardScorer:
        made.append(RewardScorer(RewardSection(reward=reward, **settings)))
        return made[-1]

    yield make
    for each in made:
        await each.dispose()
