"""The thread that computes. Everything that touches the model runs on it; the event loop only queues."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any


class ServingThread:
    """Runs queued jobs first, then `step` as long as `has_work`, and sleeps otherwise.

    Args:
        step: one bounded piece of work.
        has_work: whether `step` has something to do.
        failed: called with what `step` or a posted job raised; the thread goes on with jobs and never steps again.
    """

    def __init__(self, name: str, step: Callable[[], None], has_work: Callable[[], bool], failed: Callable[[BaseException], None]) -> None:
        self._step = step
        self._has_work = has_work
        self._failed = failed
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._healthy = True
        self._started = False
        self._since: float | None = None  # when the piece of work that it is at began

    def start(self) -> None:
        self._started = True
        self._thread.start()

    def post(self, job: Callable[[], None]) -> None:
        """Queue a job whose end nobody waits for; what it raises fails the thread."""
        self._jobs.put(job)

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function on the thread, between two steps; return or raise what it does."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def job() -> None:
            try:
                result = function(*args)
            except BaseException as error:  # carried over to the caller, whatever it is
                settle(loop, future, None, error)
            else:
                settle(loop, future, result, None)

        self._jobs.put(job)
        return await future

    @property
    def busy_seconds(self) -> float:
        """How long it has been at one piece of work; 0 between two. May be read from any thread."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    async def stop(self) -> None:
        """End the thread after the jobs that are queued. Idempotent."""
        self._jobs.put(None)
        if self._started:
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(block=not (self._healthy and self._has_work()))
            except queue.Empty:
                job = self._step
            if job is None:
                return
            self._since = time.monotonic()
            try:
                job()
            except BaseException as error:  # a thread has nobody above it: hand the error to those who wait
                self._healthy = False
                self._failed(error)
            self._since = None


def settle(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    """Resolve a future of an event loop from another thread. A caller that is gone is none of our business."""

    def resolve() -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(resolve)
