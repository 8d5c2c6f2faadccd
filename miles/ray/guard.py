"""What ends a run from outside its own course: a failed watch, SIGTERM, Ctrl-C. And how the end is told."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from miles.ray.checkpoints import SaveError
from miles.rewards.reward import RewardError
from miles.tracking.logs import on_terminal

logger = logging.getLogger(__name__)
T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ONE_REQUEST = 1.0
"""Seconds in which signals are one request: `timeout` signals its command and then the whole group."""
_BAD_INPUT = 2
"""Exit code of wrong settings, data and names of plugs, whoever finds them."""

HOUSE = Path(__file__).parents[1]
WORKER_NOTE = "\nIn worker "
"""How the note begins with which an exception brings a worker's own traceback along."""


class EndOfRun(BaseException):
    """Ends the run without being a fault: no `except Exception` on the way may swallow it. Printed as one line."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message, exit_code)
        self.message, self.exit_code = message, exit_code

    def __str__(self) -> str:
        return self.message


class Interrupted(EndOfRun):
    """A signal asked the run to end."""

    def __init__(self, signum: int, saved: str = "") -> None:
        super().__init__(f"ended by {signal.Signals(signum).name}{saved}", 128 + signum)


class RunGuard:
    """One per run, in the driver. Everything the driver's parts wait for, they wait for through `watch`."""

    def __init__(self) -> None:
        self._fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watching: set[asyncio.Task[Any] | None] = set()
        self._ended: set[asyncio.Task[Any] | None] = set()  # cancelled by `fail`
        self._on_signal: Callable[[], Awaitable[str]] | None = None
        self._old_handlers: dict[signal.Signals, Any] = {}
        self._ending: asyncio.Task[None] | None = None
        self.signum: int | None = None
        self._asked_at = 0.0

    async def watch(self, awaitable: Awaitable[T]) -> T:
        """Await it, unless the run fails first: then raise that."""
        task = asyncio.current_task()
        assert task is not None
        if self._fatal.done():
            if asyncio.iscoroutine(awaitable):
                awaitable.close()
            self._fatal.result()
        before, outermost = task.cancelling(), task not in self._watching
        self._watching.add(task)
        try:
            return await awaitable
        except asyncio.CancelledError:
            if not outermost or not self._fatal.done() or task not in self._ended or task.uncancel() > before:
                raise
        finally:
            if outermost:
                self._watching.discard(task)
                self._ended.discard(task)
        return self._fatal.result()  # type: ignore[return-value]  # always raises

    def fail(self, error: BaseException) -> None:
        """End the run with `error`: whoever waits, raises it. The first one counts."""
        if not self._fatal.done():
            self._fatal.set_exception(error)
            self._fatal.exception()  # retrieved: nobody may be waiting
            self._ended = {task for task in self._watching - {_this_task()} if task is not None and task.cancel()}

    @property
    def failed(self) -> bool:
        """Whether the run is ending with a fault or a signal."""
        return self._fatal.done()

    async def halt_if_asked(self) -> None:
        """Called before the driver starts something long: after a signal it does not return."""
        if self.signum is not None:
            await asyncio.wait({self._fatal})  # not awaited itself, as a cancelled wait would cancel it
            self._fatal.result()

    def install(self, on_signal: Callable[[], Awaitable[str]]) -> None:
        """Take SIGTERM and SIGINT. `on_signal` saves what is to be saved and returns a remark on it."""
        self._on_signal = on_signal
        loop = asyncio.get_running_loop()
        for signum in _SIGNALS:
            self._old_handlers[signum] = _handler_beyond_the_loop(signum)
            loop.add_signal_handler(signum, self._signalled, signum)
        tell_plainly()

    def restore(self) -> None:
        """Give the signals back. The hook stays: the error that ends the run is printed after this."""
        if self._on_signal is None:
            return
        self._on_signal = None
        loop = asyncio.get_running_loop()
        for signum in _SIGNALS:
            loop.remove_signal_handler(signum)
            # asyncio leaves the default action; who called the run may have had a handler of its own (None: not set from Python)
            if (before := self._old_handlers[signum]) is not None:
                signal.signal(signum, before)
        if not self._fatal.done() and _hook_before is not None and sys.exc_info()[0] is None:
            sys.excepthook = _hook_before

    def _signalled(self, signum: int) -> None:
        if self.signum is not None:
            if time.monotonic() - self._asked_at < _ONE_REQUEST:
                return
            logger.warning("second %s: ending at once", signal.Signals(signum).name)
            self.fail(Interrupted(signum))
            return
        self.signum, self._asked_at = signum, time.monotonic()
        logger.warning("%s: ending the run; send it again to end without saving", signal.Signals(signum).name)
        self._ending = asyncio.get_running_loop().create_task(self._end(signum), name="end of run on a signal")

    async def _end(self, signum: int) -> None:
        saved = ""
        try:
            if self._on_signal is not None:
                saved = await self._on_signal()
        except Exception as error:
            logger.exception("could not save on the signal")
            saved = f"; saving failed: {error}"
        self.fail(Interrupted(signum, saved))


def _this_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs here
        return None


def _handler_beyond_the_loop(signum: signal.Signals) -> Any:
    """The handler now in force; for asyncio.run's own, which dies with its loop, the one that it stands in for."""
    handler = signal.getsignal(signum)
    owner = getattr(handler.func, "__self__", None) if isinstance(handler, partial) else None
    return signal.default_int_handler if isinstance(owner, asyncio.Runner) else handler


_hook_before: Callable[..., object] | None = None


def tell_plainly() -> None:
    """From here on what ends the process is told by `tell`. A second call changes nothing."""
    global _hook_before
    if sys.excepthook is not tell:
        _hook_before, sys.excepthook = sys.excepthook, tell


def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """sys.excepthook of a run.

    An end that is no fault is one line, and has its own exit code. So is a ValueError that the house raised itself: it names
    the flag, file or row that is wrong, and frames would only bury it; its exit code is 2. And so are the failure of a reward,
    whose message holds the user's traceback, and that of a save that the file system refused. Any other fault of a worker ends
    with the worker's own traceback; the driver's frames, which only waited for it, are left out. --log-level debug shows all.
    """
    if isinstance(error, EndOfRun):
        print(f"miles: {error}", file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code)  # becomes the interpreter's exit code
    if isinstance(error, KeyboardInterrupt):  # before the run had the signals
        print("miles: ended by SIGINT", file=sys.stderr, flush=True)
        raise SystemExit(128 + signal.SIGINT)
    everything = "".join(traceback.format_exception(kind, error, trace))
    from_worker = next((note for note in getattr(error, "__notes__", ()) if note.startswith(WORKER_NOTE)), "")
    bad_input = isinstance(error, ValueError) and _raised_by_the_house(from_worker or everything)
    if logger.isEnabledFor(logging.DEBUG):
        text = everything
    elif isinstance(error, RewardError | SaveError) or bad_input:
        text = f"miles: {error}"
    else:
        text = from_worker or everything
    print(on_terminal.once(text.strip()), file=sys.stderr, flush=True)
    if bad_input:
        raise SystemExit(_BAD_INPUT)


def _raised_by_the_house(text: str) -> bool:
    """Whether the innermost frame of a printed traceback lies in this package, and not in a library or the user's code."""
    files = re.findall(r'^ *File "([^"]+)", line', text, flags=re.MULTILINE)
    return bool(files) and Path(files[-1]).is_relative_to(HOUSE)
