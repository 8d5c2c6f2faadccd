"""Processes that must not outlive the run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import psutil


def descendants() -> list[psutil.Process]:
    """Everything that this process started, and everything those started."""
    return psutil.Process().children(recursive=True)


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
