"""How one process speaks to a worker: `await handle.method(...)`, bounded, and with an error that says where to look."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol

from miles.protocols import ProcessGone, ProcessReplaced
from miles.ray.worker_spec import Limit
from miles.tracking.waits import DRIVER, Beat, Call

_LAST_LINES = 25
_STACKS_LIMIT = 5.0

caller: ContextVar[str] = ContextVar("caller", default=DRIVER)
"""The worker in whose calls this code runs, so that who waits can be told; in one process several live side by side."""

_waiting: dict[int, tuple[str, Call]] = {}  # every call under way that this process waits for, and who in it


@contextmanager
def waiting(worker: str, method: str) -> Iterator[None]:
    """While this is entered, whoever runs this code waits for that worker."""
    token = object()
    _waiting[id(token)] = caller.get(), Call(worker, method, time.time())
    try:
        yield
    finally:
        del _waiting[id(token)]


def waiting_for(name: str) -> list[Call]:
    """The calls that worker `name` of this process (or the driver) waits for. May be called from any thread."""
    return [call for who, call in list(_waiting.values()) if who == name]


class WorkerDied(ProcessGone):
    """A worker's process is gone. The message names its log and ends with the log's last lines."""

    def __init__(self, name: str, log_path: str, cause: str) -> None:
        super().__init__(name, log_path, cause)
        self.name, self.log_path, self.cause = name, log_path, cause
        self.last_lines = last_lines(log_path)

    def __str__(self) -> str:
        return f"worker {self.name} died: {self.cause}\nIts log is {self.log_path}; the last lines:\n{self.last_lines}"


class WorkerRestarted(ProcessReplaced):
    """The worker has been started again since."""


class CallTimeout(TimeoutError):
    """A call took longer than its limit; the message holds the worker's stacks."""


class Channel(Protocol):
    """How calls reach one worker. A fake of a few lines stands in for it."""

    async def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any: ...

    async def stacks(self) -> str:
        """Answers also while the worker is busy."""
        ...

    async def beat(self, with_stacks: bool) -> Beat:
        """What the worker does and waits for; answers also while it is busy."""
        ...

    async def open_port(self) -> tuple[str, int]:
        """An address of the worker's host, with a port that is free now."""
        ...


class WorkerHandle:
    """Any other attribute is a method of the hosted class: a coroutine function."""

    def __init__(self, name: str, log_path: str, channel: Channel, limits: Mapping[str, Limit], default_limit: Limit) -> None:
        self._name, self._log_path, self._channel = name, log_path, channel
        self._limits, self._default_limit = limits, default_limit

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerHandle, (self._name, self._log_path, self._channel, dict(self._limits), self._default_limit)

    def __repr__(self) -> str:
        return f"WorkerHandle({self._name})"

    def __getattr__(self, method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        if method.startswith("_"):
            raise AttributeError(method)
        return functools.partial(self._call, method)

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        limit = self._limits.get(method, self._default_limit)
        task = asyncio.current_task()
        assert task is not None
        before, giving_up = task.cancelling(), list[asyncio.Future[str]]()
        # No task of its own for the call: there is one for every request of a run.
        call = Call(self._name, method, time.time())
        _waiting[id(call)] = caller.get(), call
        timer = asyncio.get_running_loop().call_later(
            limit.seconds, lambda: giving_up.append(asyncio.ensure_future(self._stacks_then_cancel(task)))
        )
        try:
            return await self._channel.call(method, args, kwargs)
        except asyncio.CancelledError:
            if not giving_up or not giving_up[0].done() or task.uncancel() > before:
                raise
            setting = f" ({limit.setting})" if limit.setting else ""
            who = "the driver" if caller.get() == DRIVER else caller.get()
            raise CallTimeout(
                f"{who} waited {limit.seconds:g} s{setting} for {method} of worker {self._name}; log: {self._log_path}\n"
                f"What that worker was doing:\n{giving_up[0].result()}"
            ) from None
        finally:
            del _waiting[id(call)]
            timer.cancel()
            for stacks in giving_up:
                stacks.cancel()

    async def _stacks_then_cancel(self, task: asyncio.Task[Any]) -> str:
        """The stacks as they are while the call still runs."""
        text = await self.worker_stacks()
        task.cancel()
        return text

    @property
    def worker_name(self) -> str:
        return self._name

    @property
    def worker_log(self) -> str:
        return self._log_path

    async def worker_stacks(self) -> str:
        """The worker's stacks, or why there are none. Never raises."""
        try:
            return await asyncio.wait_for(self._channel.stacks(), _STACKS_LIMIT)
        except TimeoutError:
            return f"worker {self._name} did not answer within {_STACKS_LIMIT:g} s (its process is stopped or starved)"
        except WorkerDied as error:
            return str(error)

    async def worker_beat(self, with_stacks: bool = False) -> Beat | None:
        """What the worker does and waits for; None when it does not answer. Never raises."""
        try:
            return await asyncio.wait_for(self._channel.beat(with_stacks), _STACKS_LIMIT)
        except (TimeoutError, WorkerDied, WorkerRestarted):
            return None

    async def worker_port(self) -> tuple[str, int]:
        return await asyncio.wait_for(self._channel.open_port(), 30)


def last_lines(path: str, count: int = _LAST_LINES) -> str:
    try:
        with Path(path).open(errors="replace") as file:
            return "".join("  " + line for line in deque(file, count)).rstrip("\n") or "  (empty)"
    except OSError as error:
        return f"  (cannot be read here: {error})"
