"""Scores samples with a built-in verifier or the user's function, within limits, under one failure policy."""

from __future__ import annotations

import asyncio
import inspect
import math
import traceback
from collections.abc import Mapping
from typing import Any

from miles.config.reward import RewardSection
from miles.plugins import load
from miles.types import PromptGroup, Sample

BUILTIN = {
    "math": "miles.rewards.math_answer.score",
    "multiple_choice": "miles.rewards.multiple_choice.score",
    "exact": "miles.rewards.exact.score",
    "last_number": "miles.rewards.last_number.score",
    "f1": "miles.rewards.f1.score",
    "remote": "miles.rewards.remote.RemoteReward",
    "reasoning_gym": "miles.rewards.reasoning_gym.score",
}


class RewardError(RuntimeError):
    """A reward that raised, hung or returned no number, under reward_failure = fail. Holds the sample and the user's traceback."""


class GroupRewardError(RuntimeError):
    """The same under reward_failure = drop_group: the group is to be started again or dropped; the run goes on."""


class RewardScorer:
    """Fills `reward`, `reward_details` and `error` of filled samples.

    Lives in the executor; usable from any event loop and thread.
    """

    def __init__(self, args: RewardSection, which: str | None = None):
        self._name = which or args.reward
        self._timeout = args.reward_timeout
        self._failure = args.reward_failure
        loaded: Any = load(self._name, BUILTIN, setting="--reward")
        self._function: Any = loaded
        if inspect.isclass(loaded):
            self._function = self._function(args)
        call = self._function if inspect.isroutine(self._function) else type(self._function).__call__
        self._is_async = inspect.iscoroutinefunction(call)
        self.num_failed = 0
        self.num_unscored = 0

    async def score(self, sample: Sample) -> None:
        """Score one sample.

        Raises:
            RewardError: the reward failed and reward_failure is fail.
            GroupRewardError: it failed and reward_failure is drop_group.
        """
        try:
            outcome = await asyncio.wait_for(self._call(sample), self._timeout)
            reward, details = _read(outcome)
        except Exception as error:  # the border to the user's code
            self._fail(sample, error)
            return
        sample.reward, sample.reward_details = reward, details
        if reward is None:
            self.num_unscored += 1

    async def score_group(self, group: PromptGroup) -> None:
        """Score all siblings, side by side."""
        await asyncio.gather(*(self.score(sample) for sample in group.samples))

    async def dispose(self) -> None:
        """End what the scorer started. Idempotent."""

    async def _call(self, sample: Sample) -> Any:
        if self._is_async:
            return await self._function(sample)
        return await asyncio.to_thread(self._function, sample)

    def _fail(self, sample: Sample, error: Exception) -> None:
        self.num_failed += 1
        sample.reward = None
        sample.error = f"reward {self._name}: {type(error).__name__}: {error}"
        if self._failure == "exclude":
            self.num_unscored += 1
            return
        report = "".join(traceback.format_exception(error))
        kind = RewardError if self._failure == "fail" else GroupRewardError
        raise kind(f"reward {self._name!r} failed on sample {sample.sample_index}\n{report}") from error


def _read(outcome: Any) -> tuple[float | None, dict[str, float]]:
    if outcome is None:
        return None, {}
    if isinstance(outcome, Mapping):
        if "reward" not in outcome:
            raise ValueError(f'a reward given as a table needs the entry "reward"; it has {sorted(map(str, outcome))}')
        details = {str(key): float(value) for key, value in outcome.items() if key != "reward"}
        return _read(outcome["reward"])[0], details
    reward = float(outcome)
    if not math.isfinite(reward):
        raise ValueError(f"the reward is {reward}")
    return reward, {}
