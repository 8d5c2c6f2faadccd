"""One reward function, built in or the user's, called within its limits and its outcome read."""

from __future__ import annotations

import asyncio
import inspect
import math
import weakref
from collections.abc import Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from miles.config.reward import RewardSection
from miles.plugins import load
from miles.rewards.daemon_thread import CallLate, DaemonThreads
from miles.rewards.failure import text_of
from miles.rewards.pool import LimitError, PoolSpec, RewardPool, WorkerDiedError
from miles.types import Sample

BUILTIN = {
    "math": "miles.rewards.math_answer.score",
    "gsm8k": "miles.rewards.gsm8k.score",
    "dapo": "miles.rewards.dapo.score",
    "multiple_choice": "miles.rewards.multiple_choice.score",
    "exact": "miles.rewards.exact.score",
    "last_number": "miles.rewards.last_number.score",
    "ifeval": "miles.rewards.ifeval.score",
    "code": "miles.rewards.code.Code",
    "f1": "miles.rewards.f1.score",
    "think_format": "miles.rewards.think_format.score",
    "judge": "miles.rewards.judge.Judge",
    "remote": "miles.rewards.remote.RemoteReward",
    "reasoning_gym": "miles.rewards.reasoning_gym.ReasoningGym",
}

LARGEST = 3.4e38
Scored = tuple[float | None, dict[str, float]]
"""A reward and its details."""


class GaveUpError(RuntimeError):
    """A built-in verifier that an answer drove past its limits: that answer cannot be scored, and nobody's code is at fault."""

    def __init__(self, error: LimitError | WorkerDiedError):
        super().__init__(str(error))
        self.report = error.report


class RewardCall:
    """A sync function runs in processes of its own (`reward_workers`), each call on a copy of the sample; an async one on the
    loop that awaits it. A class is constructed with the settings, then called like a function; it may have a number
    `concurrency` of async calls at once. A call's limit counts from its start, not from its wait for a place."""

    def __init__(self, name: str, args: RewardSection, setting: str = "--reward"):
        self.name = name
        self._timeout = args.reward_timeout
        self._abandoned: set[asyncio.Task[Any]] = set()
        self._function: Any = load(name, BUILTIN, setting=setting)
        if not callable(self._function):
            raise ValueError(f"{setting}: {name} is {self._function!r:.80}, not a function")
        is_class = inspect.isclass(self._function)
        called = self._function.__call__ if is_class or not inspect.isroutine(self._function) else self._function
        self._is_async = inspect.iscoroutinefunction(called)
        self._pool: RewardPool | None = None
        self._threads: dict[asyncio.AbstractEventLoop, DaemonThreads] = {}
        if not self._is_async and args.reward_workers:
            self._pool = RewardPool(PoolSpec(BUILTIN.get(name, name), args, self._timeout, args.reward_memory_gb), args.reward_workers)
        elif is_class:
            self._function = self._function(args)
        self._most: int | None = getattr(self._function, "concurrency", None) if self._is_async else None
        self._places: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()

    async def __call__(self, sample: Sample) -> Scored:
        """Raises GaveUpError, or whatever the function raises."""
        try:
            if self._pool is not None:
                return read(await asyncio.wrap_future(self._pool.submit(sample)))
            if not self._is_async:
                return read(await self._in_thread(sample))
            async with self._place():
                return read(await self._within_limit(self._contained(sample)))
        except (LimitError, WorkerDiedError) as error:
            if self.name in BUILTIN and not self._is_async:
                raise GaveUpError(error) from None
            raise

    def pids(self) -> list[int]:
        """Process ids of the living workers."""
        return self._pool.pids() if self._pool is not None else []

    async def dispose(self) -> None:
        """End the processes, connections and async calls that are left. A class's own async `dispose` is called. Idempotent."""
        for task in self._abandoned:
            task.cancel()
        for threads in self._threads.values():
            threads.close()
        if self._pool is not None:
            await asyncio.to_thread(self._pool.close)
        elif inspect.iscoroutinefunction(close := getattr(self._function, "dispose", None)):
            await close()

    def _place(self) -> AbstractAsyncContextManager[None]:
        if self._most is None:
            return nullcontext()
        loop = asyncio.get_running_loop()
        if loop not in self._places:
            self._places[loop] = asyncio.Semaphore(self._most)
        return self._places[loop]

    async def _in_thread(self, sample: Sample) -> Any:
        loop = asyncio.get_running_loop()
        if loop not in self._threads:
            for old in [loop for loop in self._threads if loop.is_closed()]:
                self._threads.pop(old).close()
            self._threads[loop] = DaemonThreads()
        try:
            return await self._threads[loop].run(self._function, sample, limit=self._timeout)
        except CallLate:
            raise self._late() from None

    async def _contained(self, sample: Sample) -> Any:
        try:
            return await self._function(sample)
        except (Exception, asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # would end the event loop, and with it everybody's work
            raise RuntimeError(f"it called for an exit: {text_of(error)}") from error

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
            raise self._late()
        return task.result()

    def _late(self) -> LimitError:
        return LimitError(f"took longer than --reward-timeout {self._timeout:g} s")

    def _abandon(self, task: asyncio.Task[Any]) -> None:
        task.cancel()
        self._abandoned.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._abandoned.discard(task)
        if not task.cancelled():
            task.exception()  # read, so that asyncio does not report it as lost


def read(outcome: Any) -> Scored:
    """What a reward function returned. Raises ValueError or TypeError for what is no reward."""
    if outcome is None:
        return None, {}
    if isinstance(outcome, Mapping):
        if "reward" not in outcome:
            raise ValueError(f'a reward given as a table needs the entry "reward"; it has {sorted(map(str, outcome))}')
        details = {str(key): _number(f"the detail {str(key)!r}", value) for key, value in outcome.items() if key != "reward"}
        return read(outcome["reward"])[0], details
    reward = _number("the reward", outcome)
    if not math.isfinite(reward):
        raise ValueError(f"the reward is {reward}, not a finite number")
    if abs(reward) > LARGEST:
        raise ValueError(f"the reward is {reward:g}, which no float32 can hold")
    return reward, {}


def _number(what: str, value: Any) -> float:
    """Also of numpy, torch and booleans, but not text that looks like a number: that is a value which was not read."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise TypeError(f"{what} is {value!r:.80}, a {type(value).__name__} and not a number")
    return float(value)
