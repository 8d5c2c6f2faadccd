"""Inside a worker: one plain class, its event loop, and its compute thread.

Async methods run on the event loop. Sync methods run one after another on one thread of their own, so that torch always
sees the same thread and everything asynchronous answers while it computes.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from miles import plugins
from miles.ray.guard import WORKER_NOTE
from miles.ray.worker_handle import caller, waiting_for
from miles.tracking.waits import Beat, Call

_MOST = 8  # calls and tasks that a report shows
_BUILD_LIMIT = 180.0  # seconds that a call waits for the object that it is for


@dataclass(frozen=True)
class Failure:
    """An exception on its way to another process: the exception itself where it can travel, and its traceback as text."""

    kind: str
    message: str
    pickled: bytes | None
    traceback: str


class WorkerError(RuntimeError):
    """Stands for an exception of a worker whose type cannot travel."""


class ComputeThread:
    """Runs functions one after another. A daemon: a call that never ends cannot keep the process alive."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"{name} compute", daemon=True)
        self._thread.start()

    def run(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        future: Future[Any] = Future()
        self._jobs.put((function, future))
        return asyncio.wrap_future(future)

    def stop(self) -> None:
        """Ends the thread after the jobs that it already has."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            function, future = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:  # the caller gets whatever the worker raised, sys.exit included
                future.set_exception(error)
            del job, function, future


class Host:
    """One hosted object and the calls that are running on it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._compute = ComputeThread(name)
        self._worker: Any = None
        self._built = asyncio.Event()  # or could not be
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: dict[int, tuple[str, float, Any]] = {}  # method, since (wall clock), its coroutine where it has one
        self._calls = 0
        self._is_async: dict[str, bool] = {}  # method -> whether it runs on the event loop

    async def construct(self, cls: str, kwargs: Mapping[str, Any]) -> None:
        """Load the class and build it, on the compute thread."""
        self._loop = asyncio.get_running_loop()
        try:
            self._worker = await self._compute.run(lambda: plugins.load(cls)(**kwargs))
        finally:
            self._built.set()

    async def import_class(self, cls: str) -> None:
        await self._compute.run(lambda: plugins.load(cls))

    async def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self._worker is None:
            await self._wait_until_built(method)
        function = getattr(self._worker, method, None)
        if function is None:
            raise AttributeError(f"worker {self.name} ({type(self._worker).__name__}) has no method {method!r}")
        if method not in self._is_async:
            self._is_async[method] = inspect.iscoroutinefunction(function)
        token = caller.set(self.name)
        self._calls += 1
        number = self._calls
        coroutine = function(*args, **kwargs) if self._is_async[method] else None
        self._running[number] = (method, time.time(), coroutine)
        try:
            if coroutine is not None:
                return await coroutine
            return await self._compute.run(lambda: function(*args, **kwargs))
        finally:
            del self._running[number]
            caller.reset(token)

    async def _wait_until_built(self, method: str) -> None:
        """A worker that is started again can be called by others before its object is there."""
        try:
            await asyncio.wait_for(self._built.wait(), _BUILD_LIMIT)
        except TimeoutError:
            raise RuntimeError(f"{method} of worker {self.name}: it is still being constructed after {_BUILD_LIMIT:g} s") from None
        if self._worker is None:
            raise RuntimeError(f"{method} of worker {self.name}: it could not be constructed")

    def stacks(self) -> str:
        """What every thread and every asyncio task is doing, as text. May be called from any thread."""
        now, running = time.time(), list(self._running.values())
        calls = [f"{method} for {now - since:.1f} s" for method, since, _ in running]
        lines = [f"worker {self.name}: " + (", ".join(_counted(calls)) or "no call running")]
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            if ident != threading.get_ident():
                lines += [f"\nthread {names.get(ident, ident)}:", *_indented(traceback.format_stack(frame))]
        for method, _, coroutine in running[:_MOST]:
            if coroutine is not None:
                lines += [f"\ncall {method}:", *_indented(_awaiting(coroutine))]
        for task in list(asyncio.all_tasks(self._loop))[:_MOST] if self._loop else ():
            lines += [f"\ntask {task.get_name()}:", *_indented(_awaiting(task.get_coro()))]
        return "\n".join(lines)

    def beat(self, with_stacks: bool = False) -> Beat:
        """What this worker does and waits for. May be called from any thread.

        A worker may say more in a method `waits_for() -> list[str]`, which must not wait itself.
        """
        calls = [Call(self.name, method, since) for method, since, _ in list(self._running.values())]
        notes = self._worker.waits_for() if hasattr(self._worker, "waits_for") else []
        return Beat(self.name, calls=calls, waits=waiting_for(self.name), notes=notes, stacks=self.stacks() if with_stacks else "")

    def close(self) -> None:
        self._compute.stop()


def _counted(calls: list[str]) -> list[str]:
    return calls if len(calls) <= _MOST else [*calls[:_MOST], f"and {len(calls) - _MOST} more"]


def _awaiting(coroutine: Any) -> list[str]:
    """Where a suspended coroutine stands: its frame, and those of the coroutines that it awaits."""
    lines: list[str] = []
    while coroutine is not None:
        frame = next((frame for name in ("cr_frame", "gi_frame", "ag_frame") if (frame := getattr(coroutine, name, None))), None)
        lines += traceback.format_stack(frame, limit=1) if frame is not None else []
        coroutine = next((inner for name in ("cr_await", "gi_yieldfrom", "ag_await") if (inner := getattr(coroutine, name, None))), None)
    return lines


def _indented(stack: list[str]) -> list[str]:
    return ["  " + line for entry in stack for line in entry.rstrip().splitlines()]


def to_failure(error: BaseException) -> Failure:
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        pickled = None
    # The first frames are this host's own and tell the user nothing.
    text = "".join(traceback.format_exception(type(error), error, _user_part(error)))
    return Failure(type(error).__name__, str(error), pickled, text)


def from_failure(failure: Failure, worker: str, log_path: str) -> BaseException:
    """The exception to raise in the caller. The worker's own traceback is its note, and so the last thing that is printed."""
    error: BaseException
    try:
        error = cast(BaseException, pickle.loads(failure.pickled)) if failure.pickled else _stand_in(failure)
    except Exception:
        error = _stand_in(failure)
    if isinstance(error, SystemExit | KeyboardInterrupt | asyncio.CancelledError | GeneratorExit):
        error = _stand_in(failure)
    error.__notes__ = [f"{WORKER_NOTE}{worker} (log: {log_path}):\n\n{failure.traceback.rstrip()}"]
    return error


def _stand_in(failure: Failure) -> WorkerError:
    return WorkerError(f"{failure.kind}: {failure.message}")


def _user_part(error: BaseException) -> Any:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and Path(trace.tb_frame.f_code.co_filename).parent == Path(__file__).parent:
        trace = trace.tb_next
    return trace
