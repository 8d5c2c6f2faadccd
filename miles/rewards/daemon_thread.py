"""A sync function beside the event loop, in threads that nobody waits for at the end."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from miles.rewards.failure import text_of

MOST_AT_ONCE = 32
PATIENCE = 0.001
"""Seconds in which no call was begun, while some wait, after which each of them gets a thread of its own."""


SPACING = 0.002
"""Seconds between two times that a thread is woken: calls that come meanwhile go to it together."""


class CallLate(Exception):
    """The function has not returned within its limit, and is left to itself."""


@dataclass(slots=True, eq=False)
class _Call:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    limit: float
    outcome: asyncio.Future[Any]
    begun: float = 0.0
    given_up: bool = False  # it is past its limit: its thread is not counted any more
    value: Any = None
    error: BaseException | None = None


@dataclass(slots=True, eq=False)
class _Thread:
    wake: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)


class DaemonThreads:
    """As asyncio.to_thread, but a function that never returns keeps neither the event loop nor the process from ending.

    Belongs to the event loop in which it is made. A switch of threads costs more than many a function: so calls follow one
    another on one thread for as long as they are short, and what they returned is handed over together.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()  # for the queue, and who works on it
        self._waiting: deque[_Call] = deque()
        self._idle: list[_Thread] = []
        self._working = 0  # threads that take calls from the queue, or are inside one that has not been given up
        self._running: dict[_Call, None] = {}  # in the order of their beginning
        self._ended: deque[_Call] = deque()
        self._telling = False  # the loop is about to look at what has ended
        self._woken = 0.0  # when a thread was last called for, of the loop's clock
        self._begun = 0  # calls so far
        self._begun_before = 0  # as the last look saw it
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0  # when it goes off, of the loop's clock: a moment that is past has a handle without `when` under uvloop
        self._closed = False

    async def run(self, function: Callable[..., Any], *args: Any, limit: float) -> Any:
        """Raises what the function raises, and CallLate `limit` seconds after its beginning. Cancelled or late, it is left to itself."""
        call = _Call(function, args, limit, self._loop.create_future())
        now = self._loop.time()
        with self._lock:
            self._waiting.append(call)
            if self._working == 0 and now - self._woken >= SPACING:
                self._add_thread()
        soon = max(now + PATIENCE, self._woken + SPACING) if self._working == 0 else now + PATIENCE
        if self._timer is None or self._due > soon:
            self._look_at(soon)
        return await call.outcome

    def close(self) -> None:
        """Let the threads that have nothing to do end. Idempotent."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            while self._idle:
                self._idle.pop().wake.put(None)

    def _look(self) -> None:
        """Give up what is past its limit, and see to it that nobody waits behind a long call."""
        now = time.monotonic()
        with self._lock:
            while self._waiting and self._waiting[0].outcome.done():  # cancelled
                self._waiting.popleft()
            late = [call for call in self._running if call.outcome.done() or now - call.begun >= call.limit]
            for call in late:
                call.given_up = True
                del self._running[call]
            self._working -= len(late)
            held_up = self._begun == self._begun_before
            self._begun_before = self._begun
            if self._waiting and self._working == 0:
                self._add_thread()
            elif self._waiting and held_up:
                for _ in range(min(len(self._waiting), MOST_AT_ONCE - self._working)):
                    self._add_thread()
            ends = [call.begun + call.limit for call in self._running]
            waits = bool(self._waiting) and len(self._running) < MOST_AT_ONCE  # of threads some may not have begun yet
        for call in late:
            if not call.outcome.done():
                call.outcome.set_exception(CallLate())
        self._timer = None
        if waits or ends:
            self._look_at(self._loop.time() + (PATIENCE if waits else max(min(ends) - now, PATIENCE)))

    def _look_at(self, moment: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due = moment
        self._timer = self._loop.call_at(moment, self._look)

    def _add_thread(self) -> None:
        self._working += 1
        self._woken = self._loop.time()
        if self._idle:
            self._idle.pop().wake.put(None)
        else:
            threading.Thread(target=self._work, args=(_Thread(),), daemon=True, name="reward").start()

    def _work(self, me: _Thread) -> None:
        while True:
            while (call := self._next(me)) is not None:
                try:
                    call.value = call.function(*call.args)
                except BaseException as error:  # carried to the caller, whatever it is
                    call.error = _carried(error)
                if not self._tell(call):
                    return
            if self._closed:
                return
            me.wake.get()

    def _next(self, me: _Thread) -> _Call | None:
        """The next call, begun; or None, and this thread is idle."""
        with self._lock:
            while self._waiting and not self._closed:
                call = self._waiting.popleft()
                if not call.outcome.cancelled():
                    call.begun = time.monotonic()
                    self._running[call] = None
                    self._begun += 1
                    return call
            self._working -= 1
            if not self._closed:
                self._idle.append(me)
            return None

    def _tell(self, call: _Call) -> bool:
        """Hand over what a call returned. False: it was given up, and others do this thread's work."""
        with self._lock:
            if call.given_up:
                return False
            del self._running[call]
            self._ended.append(call)
            told, self._telling = self._telling, True
        if not told:
            with suppress(RuntimeError):  # the loop is closed: nobody asks any more
                self._loop.call_soon_threadsafe(self._settle)
        return True

    def _settle(self) -> None:
        with self._lock:
            ended, self._ended, self._telling = self._ended, deque(), False
        for call in ended:
            if call.outcome.done():
                continue
            if call.error is not None:
                call.outcome.set_exception(call.error)
            else:
                call.outcome.set_result(call.value)


def _carried(error: BaseException) -> BaseException:
    """A future takes no StopIteration, asyncio lets those that end a process out of its loop, and a user's function ends only itself."""
    if isinstance(error, StopIteration) or not isinstance(error, Exception):
        return RuntimeError(f"it called for an exit: {text_of(error)}").with_traceback(error.__traceback__)
    return error
