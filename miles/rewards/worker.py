"""The process that runs a sync reward function: reads samples from a socket, answers scores. Started by `pool.py`.

It ends itself when its parent goes, even while the function hangs: a thread watches the socket pair's life pipe, and an
alarm with the default action ends the process when a call holds the interpreter past its limit.
"""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import os
import pickle
import resource
import select
import signal
import socket
import threading
import traceback
from pathlib import Path
from typing import Any

from miles.plugins import load
from miles.rewards.failure import text_of
from miles.rewards.frames import receive, send
from miles.types import Sample  # here, not at the first sample: its import is not to count against that sample's limit

LIMIT_GRACE = 5.0
"""Seconds past its limit at which a worker ends itself; the parent kills it at the limit."""


def main(channel_fd: int, life_fd: int, stack_fd: int) -> None:
    channel = socket.socket(fileno=channel_fd)
    threading.Thread(target=_end_with_parent, args=(life_fd, os.getppid()), daemon=True).start()
    faulthandler.register(signal.SIGUSR1, file=stack_fd, all_threads=False)
    start = pickle.loads(receive(channel))
    _be_the_first_to_die(start["memory_gb"])
    try:
        function = _load(start["path"], start["args"])
    except BaseException as error:  # the user's module may do anything
        send(channel, pickle.dumps(("error", _short(error), traceback.format_exc())))
        return
    send(channel, pickle.dumps(("ready", None, "")))
    while True:
        try:
            limit, sample = pickle.loads(receive(channel))
        except EOFError:
            return
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, limit + LIMIT_GRACE)
        answer = _call(function, sample)
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(channel, answer)


def _load(path: str, args: Any) -> Any:
    loaded: Any = load(path)
    is_class = inspect.isclass(loaded)
    return loaded(args) if is_class else loaded


def _call(function: Any, sample: Sample) -> bytes:
    worker = os.getpid()
    try:
        value = function(sample)
        if os.getpid() != worker:
            os._exit(0)  # a child that the function forked and forgot: the answer is its parent's
        return _pickled(value)
    except BaseException as error:  # sys.exit() in a reward is a failure of that reward
        if os.getpid() != worker:
            os._exit(1)
        frames = traceback.extract_tb(error.__traceback__)[1:]
        report = "Traceback (most recent call last):\n" + "".join(traceback.format_list(frames) + traceback.format_exception_only(error))
        return pickle.dumps(("full" if isinstance(error, MemoryError) else "error", _short(error), report))


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(("value", value, ""))
    except Exception as error:  # a generator, a coroutine, a table without a bottom
        raise TypeError(f'it returned a {type(value).__name__}, not a number or a table with "reward"') from error


def _short(error: BaseException) -> str:
    hint = " (--reward-memory-gb limits what it may take)" if isinstance(error, MemoryError) else ""
    return text_of(error) + hint


def _end_with_parent(life_fd: int, parent: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # which asks where the function is, not this thread
    while not select.select([life_fd], [], [], 1.0)[0] and os.getppid() == parent:
        pass
    os.killpg(0, signal.SIGKILL)  # also what the function started; the worker leads a group of its own


def _be_the_first_to_die(memory_gb: float) -> None:
    """A reward that eats memory gets MemoryError, or is what the kernel ends, not the trainer beside it."""
    limit = int(memory_gb * 2**30)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
