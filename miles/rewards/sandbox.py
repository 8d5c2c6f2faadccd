"""Runs a Python program that nobody has read: little time and memory, no network, a folder of its own, nothing left behind.

What holds depends on the machine. Where a user may make namespaces (most Linux hosts, and containers that allow `unshare`), the
kernel takes the network away, shows no other process, and makes every file system read-only but the program's folder.
Elsewhere Python's audit hooks refuse sockets, other programs and writing outside the folder: enough for what models
write, not for an attacker. In both the program may read what your user may read.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

from miles.rewards import sandbox_child

logger = logging.getLogger(__name__)

MOST_OUTPUT = 2**20
"""Bytes of output that are read; a program may write files of eight times that."""
CLOCK_FACTOR = 3
PROCESSES = 32
LOOK_EVERY = 0.05
"""Seconds between looks at how many processes there are."""
STARTING = 5.0
"""Seconds that Python and the namespaces may take to start on a busy machine, beside the program's own limit."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What became of a program. `fault`: "" or time, memory, processes, exit code N, or signal N."""

    output: str
    errors: str  # the end of its stderr
    fault: str
    isolated: bool  # by the kernel


def run(program: str, given: str = "", *, seconds: float, memory_mb: int, clock: float | None = None) -> Ran:
    """Run a Python program with `given` as its input.

    Args:
        seconds: of CPU of each process, whole ones.
        memory_mb: address space of each process, in MiB.
        clock: seconds of the clock, beyond Python's start; default: CLOCK_FACTOR times `seconds`, as the machine may be busy.
    """
    isolated = has_namespaces()
    with tempfile.TemporaryDirectory(prefix="miles-code-", ignore_cleanup_errors=True) as folder:
        path = Path(folder)
        (path / "program.py").write_text(program, encoding="utf-8", errors="surrogatepass")
        (path / "input").write_text(given, encoding="utf-8", errors="surrogatepass")
        orders = {
            "folder": folder,
            "program": str(path / "program.py"),
            "namespaces": isolated,
            "memory": memory_mb * 2**20,
            "cpu": max(1, round(seconds)),
            "file_size": 8 * MOST_OUTPUT,
            "processes": PROCESSES + 8,
        }
        process, fault = _start(path, orders), ""
        try:
            fault = _watch(process, clock or CLOCK_FACTOR * seconds)
        finally:
            _end(process)
        output, errors = (_tail(path / name) for name in ("output", "errors"))
        return Ran(output, errors[-2000:], fault or _fault(process.returncode, errors), isolated)


@cache
def has_namespaces() -> bool:
    """Whether this machine lets us make them, tried once."""
    with tempfile.TemporaryDirectory(prefix="miles-code-") as folder:
        (Path(folder) / "program.py").touch()
        orders = {
            "folder": folder,
            "program": f"{folder}/program.py",
            "namespaces": True,
            "memory": 2**32,
            "cpu": 30,
            "file_size": 2**20,
            "processes": PROCESSES + 8,
        }
        tried = subprocess.run(
            [sys.executable, "-I", sandbox_child.__file__, json.dumps(orders)], capture_output=True, text=True, check=False
        )
    if tried.returncode:
        logger.warning(
            "--reward code: this machine allows no namespaces (%s); network and files are guarded by Python alone",
            tried.stderr.strip().rpartition("\n")[2],
        )
    return tried.returncode == 0


def _start(path: Path, orders: dict[str, object]) -> subprocess.Popen[bytes]:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(path), "TMPDIR": str(path), "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
    with (path / "input").open("rb") as given, (path / "output").open("wb") as output, (path / "errors").open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-I", sandbox_child.__file__, json.dumps(orders)],
            stdin=given,
            stdout=output,
            stderr=errors,
            cwd=path,
            env=environment,
            start_new_session=True,
        )


def _watch(process: subprocess.Popen[bytes], seconds: float) -> str:
    """Waits for the program; returns why it must be ended, if it must."""
    end = time.monotonic() + seconds + STARTING
    family = psutil.Process(process.pid)
    while True:
        try:
            process.wait(LOOK_EVERY)
            return ""
        except subprocess.TimeoutExpired:
            pass
        with contextlib.suppress(psutil.Error):
            children = family.children(recursive=True)
            if len(children) > PROCESSES:
                return "processes"
            if children:
                end = min(end, time.monotonic() + seconds)
        if time.monotonic() > end:
            return "time"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill all that is left. In namespaces the end of the first process is the end of all."""
    left: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        left = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for child in left:
        with contextlib.suppress(psutil.Error):
            child.kill()
    process.wait()


def _fault(code: int, errors: str) -> str:
    if code == 0:
        return ""
    if "MemoryError" in errors[-200:]:
        return "memory"
    number = -code if code < 0 else code - 128
    if number in (signal.SIGXCPU, signal.SIGKILL):
        return "time"
    return f"signal {number}" if 0 < number < 65 else f"exit code {code}"


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - MOST_OUTPUT))
        return file.read(MOST_OUTPUT).decode(errors="replace")
