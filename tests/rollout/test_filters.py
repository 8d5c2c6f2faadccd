from __future__ import annotations

import numpy as np
import pytest

from miles.rollout.filters import load_filter, reward_spread
from miles.types import PromptGroup, Sample


def group(*rewards: float | None) -> PromptGroup:
    return PromptGroup(0, 0, 0, [Sample(place, 0, "", [1], reward=reward) for place, reward in enumerate(rewards)])


@pytest.mark.case("C48")
@pytest.mark.parametrize(
    ("rewards", "verdict"),
    [
        ([1, 0, 0, 0], None),
        ([1, 1, 1, 0], None),
        ([1, 1, 0, 0], None),
        ([1, 1, 1, 1], "same_reward"),
        ([0, 0, 0, 0], "same_reward"),
        ([None, None], "unscored"),
        ([None, 1.0], "same_reward"),
        ([None, 1.0, 0.0], None),
        ([-1.0, -1.0], "same_reward"),
        ([-1.0, 1.0], None),
        ([0.0, 1e-9], None),
        ([1.0], "same_reward"),
    ],
)
def test_groups_without_spread_are_refused(rewards: list[float | None], verdict: str | None) -> None:
    assert reward_spread(group(*rewards)) == verdict


@pytest.mark.case("C48")
@pytest.mark.parametrize("value", [0.3, 9.61, 0.1, 1e-6, 123456.789])
def test_numbers_that_went_through_float32_are_not_spread(value: float) -> None:
    as_float32 = float(np.float32(value))
    assert reward_spread(group(*[as_float32] * 31)) == "same_reward"
    assert reward_spread(group(value, as_float32, float(np.float32(value) * np.float32(3) / np.float32(3)))) == "same_reward"


@pytest.mark.case("C48")
def test_a_trajectory_that_was_split_counts_once() -> None:
    def split(*rewards: float) -> list[Sample]:
        return [Sample(0, 0, "", [1], reward=reward) for reward in rewards]

    uniform = PromptGroup(0, 0, 0, [split(0.0, 0.2, 1.0), split(1.0)])  # type: ignore[list-item]
    assert reward_spread(uniform) == "same_reward"
    spread = PromptGroup(0, 0, 0, [split(1.0, 1.0, 0.0), split(1.0), []])  # type: ignore[list-item]
    assert reward_spread(spread) is None


def test_filters_go_by_name_or_path() -> None:
    assert load_filter(None) is None
    assert load_filter("reward_spread") is reward_spread
    with pytest.raises(ValueError, match="--group-filter: 'spread' is neither built in"):
        load_filter("spread")
