"""Scores samples with a built-in verifier or the user's function, within limits, under one failure policy."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import time
import traceback
from collections.abc import Coroutine, Mapping
from typing import Any

from miles.config.reward import RewardSection
from miles.plugins import load
from miles.rewards.daemon_thread import DaemonThreads
from miles.rewards.pool import FunctionError, LimitError, PoolSpec, RewardPool, WorkerDiedError
from miles.types import PromptGroup, Sample

logger = logging.getLogger(__name__)

BUILTIN = {
    "math": "miles.rewards.math_answer.score",
    "multiple_choice": "miles.rewards.multiple_choice.score",
    "exact": "miles.rewards.exact.score",
    "last_number": "miles.rewards.last_number.score",
    "f1": "miles.rewards.f1.score",
    "remote": "miles.rewards.remote.RemoteReward",
    "reasoning_gym": "miles.rewards.reasoning_gym.ReasoningGym",
}


class RewardError(RuntimeError):
    """A reward that raised, hung or gave no number, under reward_failure fail. The message ends with the user's traceback."""


class GroupRewardError(RuntimeError):
    """The same under reward_failure drop_group: start the group again or drop it; the run goes on."""


class RewardScorer:
    """Fills `reward`, `reward_details` and `error` of generated samples.

    Lives in the executor. Works on any event loop and in any thread: sync functions run in processes of their own
    (`reward_workers`), each call on a copy of the sample; async functions run on the loop that awaits `score`.
    A class is constructed with the settings, then called like a function.
    """

    def __init__(self, args: RewardSection, which: str | None = None):
        self.name = which or args.reward
        self.num_failed = 0
        self.num_unscored = 0
        self._timeout = args.reward_timeout
        self._failure = args.reward_failure
        self._abandoned: set[asyncio.Task[Any]] = set()
        self._scoring: dict[int, float] = {}  # sample_index -> since, of the wall clock
        path = BUILTIN.get(self.name, self.name)
        self._function: Any = load(self.name, BUILTIN, setting="--reward")
        is_class = inspect.isclass(self._function)
        called = self._function.__call__ if is_class or not inspect.isroutine(self._function) else self._function
        self._is_async = inspect.iscoroutinefunction(called)
        self._pool: RewardPool | None = None
        self._threads = DaemonThreads()
        if not self._is_async and args.reward_workers:
            self._pool = RewardPool(PoolSpec(path, args, self._timeout, args.reward_memory_gb), args.reward_workers)
        elif is_class:
            self._function = self._function(args)

    async def score(self, sample: Sample) -> None:
        """Score one sample. A reward of None (the verifier cannot tell) is counted in `num_unscored`, not a failure.

        Raises:
            RewardError: the reward failed and reward_failure is fail.
            GroupRewardError: it failed and reward_failure is drop_group.
        """
        self._scoring[sample.sample_index] = time.time()
        try:
            reward, details = _read(await self._call(sample))
        except Exception as error:  # the border to the user's code
            if self.name in BUILTIN and not self._is_async and isinstance(error, LimitError | WorkerDiedError):
                reward, details = 0.0, {"over_limit": 1.0}  # an answer that its verifier cannot digest is a wrong one
            else:
                self._fail(sample, error)
                return
        finally:
            self._scoring.pop(sample.sample_index, None)
        sample.reward, sample.reward_details = reward, details
        self.num_unscored += reward is None

    def waits_for(self) -> list[str]:
        """The scores that are not there yet, in words. May be called from any thread."""
        since = list(self._scoring.values())
        if not since:
            return []
        oldest = time.time() - min(since)
        return [f"reward {self.name!r} of {len(since)} samples, the oldest for {oldest:.0f} s (--reward-timeout {self._timeout:g} s)"]

    async def score_group(self, group: PromptGroup) -> None:
        """Score all siblings side by side; raises the first sibling's failure once all are done."""
        outcomes = await asyncio.gather(*(self.score(sample) for sample in group.samples), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def dispose(self) -> None:
        """End the processes, connections and async calls that are left. A class's own async `dispose` is called. Idempotent."""
        for task in self._abandoned:
            task.cancel()
        if self._pool is not None:
            await asyncio.to_thread(self._pool.close)
        elif inspect.iscoroutinefunction(close := getattr(self._function, "dispose", None)):
            await close()

    async def _call(self, sample: Sample) -> Any:
        if self._pool is not None:
            return await asyncio.wrap_future(self._pool.submit(sample))
        return await self._within_limit(self._contained(sample))

    async def _contained(self, sample: Sample) -> Any:
        try:
            return await (self._function(sample) if self._is_async else self._threads.run(self._function, sample))
        except SystemExit as error:  # would end the event loop, and with it everybody's work
            raise RuntimeError(f"the reward called for an exit: SystemExit: {error}") from error

    async def _within_limit(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Unlike asyncio.wait_for, does not wait for a call that ignores its cancellation."""
        task = asyncio.ensure_future(call)
        try:
            done, _ = await asyncio.wait({task}, timeout=self._timeout)
        except asyncio.CancelledError:
            self._abandon(task)
            raise
        if not done:
            self._abandon(task)
            raise LimitError(f"took longer than --reward-timeout {self._timeout:g} s")
        return task.result()

    def _abandon(self, task: asyncio.Task[Any]) -> None:
        task.cancel()
        self._abandoned.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._abandoned.discard(task)
        if not task.cancelled():
            task.exception()  # read, so that asyncio does not report it as lost

    def _fail(self, sample: Sample, error: Exception) -> None:
        self.num_failed += 1
        sample.reward, sample.reward_details = None, {}
        what = str(error) if isinstance(error, FunctionError) else f"{type(error).__name__}: {error}"
        sample.error = f"reward {self.name}: {what}"
        report = error.report if isinstance(error, FunctionError) else "".join(traceback.format_exception(error))
        message = f"reward {self.name!r} failed on sample {sample.sample_index} (group {sample.group_index}): {what}"
        message += f"\n\n{report.rstrip()}" if report else ""
        if self._failure == "fail":
            raise RewardError(message) from None
        if self.num_failed == 1:
            logger.warning("%s\n(further failures are counted, not shown)", message)
        if self._failure == "drop_group":
            raise GroupRewardError(message) from None
        self.num_unscored += 1


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
        raise ValueError(f"the reward is {reward}, not a finite number")
    return reward, {}
