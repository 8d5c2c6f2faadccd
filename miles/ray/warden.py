"""Ends what a killed driver leaves of its local Ray. Run as a file beside the driver, with the standard library alone.

    python -I -S miles/ray/warden.py FOLDER DRIVER_PID

Ray's workers end within some seconds of their driver, and what those started ends with them. Ray's own agents go on for a minute, as they
try to tell a server of the death that is gone as well. So this process notes, while the driver lives, who descends from its Ray; once its
standard input closes, as the driver is gone, it ends those that are still there after a grace, and removes Ray's folder.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

LOOK_SECONDS = 5.0
GRACE = 3.0
LIMIT = 60.0
"""Seconds for killed processes to go; one that hangs in the kernel is left to it."""
NOBODY = -1
SERVICES = ("raylet", "gcs_server")


class Known(NamedTuple):
    """One process; its number alone may be another's by now."""

    pid: int
    started: str  # clock ticks since boot


class Warden:
    """The driver's end. On Linux only, as Ray's processes end otherwise elsewhere."""

    def __init__(self, folder: str) -> None:
        command = [sys.executable, "-I", "-S", __file__, folder, str(os.getpid())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) if sys.platform == "linux" else None

    def dismiss(self) -> None:
        """The driver ends its Ray itself. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def look() -> tuple[dict[int, str], dict[int, list[Known]]]:
    """Every living process: pid -> its command's name, and parent -> children."""
    names: dict[int, str] = {}
    children: dict[int, list[Known]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            name, _, rest = (folder / "stat").read_text(errors="replace").partition("(")[2].rpartition(")")
            state, parent, *fields = rest.split()
            if state not in "ZX":
                names[int(folder.name)] = name
                children.setdefault(int(parent), []).append(Known(int(folder.name), fields[17]))
    return names, children


def family(driver: int, known: set[Known]) -> set[Known]:
    """Those of `known` that live, Ray's services under `driver`, and all that descends from either."""
    names, children = look()
    living = {process for processes in children.values() for process in processes}
    found: set[Known] = set()
    front = {process for process in children.get(driver, ()) if names[process.pid] in SERVICES} | (known & living)
    while front:
        found |= front
        front = {child for process in front for child in children.get(process.pid, ())} - found
    return found


def clean_up(folder: str, known: set[Known]) -> None:
    """Called when the driver is gone."""
    deadline = time.monotonic() + GRACE
    while (known := family(NOBODY, known)) and time.monotonic() < deadline + LIMIT:
        for process in known if time.monotonic() > deadline else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)


def main(folder: str, driver: int) -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    known: set[Known] = set()
    pause = LOOK_SECONDS / 32  # Ray's processes come one by one at the start
    while not select.select([0], [], [], pause)[0]:
        known = family(driver, known)
        pause = min(2 * pause, LOOK_SECONDS)
    clean_up(folder, known)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
