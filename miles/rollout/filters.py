"""Group filters: whether a scored group is worth training on. Built in: reward_spread."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from miles.plugins import load
from miles.protocols import GroupFilter
from miles.types import PromptGroup

BUILTIN = {"reward_spread": "miles.rollout.filters.reward_spread"}
RELATIVE_SPREAD = 1e-6
"""Rewards closer than this, relative to the largest, are the same number that went through float32 (2**-23 is 1.2e-7)."""


def load_filter(name: str | None) -> GroupFilter | None:
    """The filter that `group_filter` names, or None."""
    if name is None:
        return None
    found: GroupFilter = load(name, BUILTIN, setting="--group-filter")
    return found


def reward_spread(group: PromptGroup) -> str | None:
    """Keep groups in which at least two scored trajectories have different rewards.

    Compares the extremes and never a standard deviation: in float32 that of six times 0.3 is 3e-8, not 0. A trajectory
    that was split into a list of training samples counts once, with its last sample's reward; unscored ones do not count.
    """
    rewards = [reward for reward in trajectory_rewards(group.samples) if reward is not None]
    if not rewards:
        return "unscored"
    low, high = min(rewards), max(rewards)
    if high - low > RELATIVE_SPREAD * max(abs(low), abs(high)):
        return None
    return "same_reward"


def trajectory_rewards(samples: Iterable[Any]) -> list[float | None]:
    """One reward per trajectory; a trajectory is a Sample, or a list of the Samples that it was split into."""
    lasts = [entry[-1] if isinstance(entry, list | tuple) and entry else entry for entry in samples]
    return [entry.reward for entry in lasts if not isinstance(entry, list | tuple)]
