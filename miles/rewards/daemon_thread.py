"""A sync function beside the event loop, in a thread that nobody waits for at the end."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

MOST_AT_ONCE = 32


Job = Callable[[], None]


class DaemonThreads:
    """As asyncio.to_thread, but a function that never returns keeps neither the event loop nor the process from ending."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(MOST_AT_ONCE)
        self._idle: list[queue.SimpleQueue[Job | None]] = []  # of threads that wait for a job
        self._closed = False

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Raises what the function raises. Cancelled, it leaves the function to itself."""
        async with self._places:
            loop = asyncio.get_running_loop()
            outcome: asyncio.Future[Any] = loop.create_future()
            jobs = self._idle.pop() if self._idle else self._start()

            def work() -> None:
                try:
                    settle, value = outcome.set_result, function(*args)
                except BaseException as error:  # carried to the caller, whatever it is
                    settle, value = outcome.set_exception, _carried(error)
                self._idle.append(jobs)
                with suppress(RuntimeError):  # the loop is closed: nobody asks any more
                    loop.call_soon_threadsafe(lambda: outcome.done() or settle(value))

            jobs.put(work)
            return await outcome

    def close(self) -> None:
        """Let the threads that have nothing to do end. Idempotent."""
        self._closed = True
        while self._idle:
            self._idle.pop().put(None)

    def _start(self) -> queue.SimpleQueue[Job | None]:
        jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()

        def live() -> None:
            while (job := jobs.get()) is not None:
                job()
                if self._closed:
                    return

        threading.Thread(target=live, daemon=True, name="reward").start()
        return jobs


def _carried(error: BaseException) -> BaseException:
    """A future takes no StopIteration, and asyncio lets the two that end a process out of its loop."""
    if isinstance(error, StopIteration | SystemExit | KeyboardInterrupt):
        return RuntimeError(f"the reward called for an exit: {type(error).__name__}: {error}").with_traceback(error.__traceback__)
    return error
