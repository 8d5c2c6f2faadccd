"""Processes that must not outlive the run."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator

import psutil

_apart = False


def _leave_the_group() -> None:
    if _apart:
        os.setpgrp()


os.register_at_fork(after_in_child=_leave_the_group)


@contextlib.contextmanager
def in_groups_of_their_own() -> Iterator[None]:
    """What is forked in here with a preexec_fn, as Ray starts its services, gets no signal that is meant for this process's group.

    `timeout`, service managers and batch systems end a job by signalling its whole group; Ray's services would die at once, and the
    run could neither save nor end its workers. On Linux only: there Ray has them die with this process, elsewhere through their group.
    """
    global _apart
    _apart = sys.platform == "linux"
    try:
        yield
    finally:
        _apart = False


def children() -> set[psutil.Process]:
    """What this process has started and still runs."""
    return set(psutil.Process().children())


def with_descendants(started: Iterable[psutil.Process]) -> list[psutil.Process]:
    """`started`, and everything that they started."""
    found = []
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [process, *process.children(recursive=True)]
    return found


def end(processes: Iterable[psutil.Process], grace: float = 2.0) -> list[str]:
    """End what still lives of `processes`: a polite signal, then a hard one. Returns the names of those it had to end."""
    living = [process for process in processes if _lives(process)]
    names = []
    for process in living:
        with contextlib.suppress(psutil.NoSuchProcess):
            names.append(f"{process.name()} ({process.pid})")
            process.terminate()
    _, stubborn = psutil.wait_procs(living, timeout=grace)
    for process in stubborn:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(stubborn, timeout=grace)
    return names


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
