"""Scores samples: by one reward or a weighted mix, the same for all or by data set, under one failure policy."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Sequence

from miles.config.reward import RewardSection, parts_of
from miles.rewards.call import GaveUpError, RewardCall, Scored
from miles.rewards.failure import text_of
from miles.rewards.pool import FunctionError
from miles.tracking.clock import now
from miles.types import PromptGroup, Sample

logger = logging.getLogger(__name__)


class RewardError(RuntimeError):
    """A reward that raised, hung or gave no number, under reward_failure fail. The message ends with the user's traceback."""


class GroupRewardError(RuntimeError):
    """The same under reward_failure drop_group: start the group again or drop it; the run goes on."""


class RewardScorer:
    """Fills `reward`, `reward_details` and `error` of generated samples.

    Lives in the executor. Works on any event loop and in any thread. A mix such as math=0.8,think_format=0.2 is the
    weighted sum of its parts, which run side by side; each part is a detail too. A part that abstains (None) leaves the
    whole sample unscored, one that fails fails it.
    """

    def __init__(self, args: RewardSection, which: str | None = None):
        self.name = which or args.reward
        self.num_failed = 0
        self.num_unscored = 0
        self._timeout = args.reward_timeout
        self._failure = args.reward_failure
        self._scoring: dict[int, float] = {}  # sample_index -> since, of the wall clock
        self._mixes = {"": parts_of(self.name), **{name: parts_of(mix) for name, mix in args.reward_by_set.items()}}
        self._calls: dict[str, RewardCall] = {}
        for data_set, mix in self._mixes.items():
            for part in mix:
                if part not in self._calls:
                    self._calls[part] = RewardCall(part, args, "--reward-by-set" if data_set else "--reward")

    async def score(self, sample: Sample) -> None:
        """Score one sample. A reward of None (the verifier cannot tell) is counted in `num_unscored`, not a failure.

        Raises:
            RewardError: the reward failed and reward_failure is fail.
            GroupRewardError: it failed and reward_failure is drop_group.
        """
        mix = self._mixes.get(sample.data_set, self._mixes[""])
        self._scoring[sample.sample_index] = now()
        try:
            outcomes = await self._outcomes(mix, sample)
        finally:
            self._scoring.pop(sample.sample_index, None)
        scored: dict[str, Scored] = {}
        for part, outcome in zip(mix, outcomes, strict=True):
            if isinstance(outcome, Exception):  # the border to the user's code
                self._fail(sample, part, outcome)
                return
            if isinstance(outcome, BaseException):
                raise outcome
            scored[part] = outcome
        sample.reward, sample.reward_details = mixed(mix, scored)
        self.num_unscored += sample.reward is None

    async def _outcomes(self, mix: dict[str, float], sample: Sample) -> Sequence[Scored | BaseException]:
        """Of all parts, in order. One alone needs no task of its own."""
        if len(mix) > 1:
            return await asyncio.gather(*(self._calls[part](sample) for part in mix), return_exceptions=True)
        try:
            return [await self._calls[part](sample) for part in mix]
        except Exception as error:  # the border to the user's code
            return [error]

    def waits_for(self) -> list[str]:
        """The scores that are not there yet, in words. May be called from any thread."""
        since = list(self._scoring.values())
        if not since:
            return []
        oldest = now() - min(since)
        return [f"reward {self.name!r} of {len(since)} samples, the oldest for {oldest:.0f} s (--reward-timeout {self._timeout:g} s)"]

    async def score_group(self, group: PromptGroup) -> None:
        """Score all siblings side by side; raises the first sibling's failure once all are done."""
        outcomes = await asyncio.gather(*(self.score(sample) for sample in group.samples), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    def pids(self) -> list[int]:
        """Process ids of the living workers."""
        return [pid for call in self._calls.values() for pid in call.pids()]

    async def dispose(self) -> None:
        """End the processes, connections and async calls that are left. A class's own async `dispose` is called. Idempotent."""
        for call in self._calls.values():
            await call.dispose()

    def _fail(self, sample: Sample, part: str, error: Exception) -> None:
        """The policy. A built-in verifier that an answer drove past its limits does not end the run: that answer is left out."""
        self.num_failed += 1
        sample.reward, sample.reward_details = None, {}
        told = isinstance(error, FunctionError | GaveUpError)
        what = str(error) if told else text_of(error)
        sample.error = f"reward {part}: {what}"
        report = error.report if isinstance(error, FunctionError | GaveUpError) else "".join(traceback.format_exception(error))
        message = f"reward {part!r} failed on sample {sample.sample_index} (group {sample.group_index}): {what}"
        message += f"\n\n{report.rstrip()}" if report else ""
        if self._failure == "fail" and not isinstance(error, GaveUpError):
            raise RewardError(message) from None
        if self.num_failed == 1:
            logger.warning("%s\n(further failures are counted, not shown)", message)
        if self._failure == "drop_group":
            raise GroupRewardError(message) from None
        self.num_unscored += 1


def mixed(mix: dict[str, float], scored: dict[str, Scored]) -> Scored:
    """The weighted sum, None when a part is. Of several parts each is a detail, and a part's own details carry its name."""
    if len(mix) == 1:
        ((part, weight),) = mix.items()
        reward, details = scored[part]
        return (None if reward is None else weight * reward), details
    details = {part: reward for part, (reward, _) in scored.items() if reward is not None}
    details |= {f"{part}/{name}": value for part, (_, own) in scored.items() for name, value in own.items()}
    rewards = [(mix[part], reward) for part, (reward, _) in scored.items()]
    if any(reward is None for _, reward in rewards):
        return None, details
    return sum(weight * reward for weight, reward in rewards if reward is not None), details
