"""Processes that live one life of a run each, and are killed: the driver in this or that way, or one of its workers under Ray."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from miles.tracking import ledger

ROOT = Path(__file__).parents[1]
LONGEST = 900.0  # seconds of one life
GONE = 20.0  # seconds within which nothing may be left of a run whose driver is gone
DRIVER, ALL = "driver", "all"


class Strike(NamedTuple):
    """SIGKILL from outside, `seconds` after rollout `after` was trained (-1: at once). Workers are those of Ray."""

    victim: str
    after: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.victim}, {self.seconds:.2f} s after rollout {self.after}"


@dataclass
class Life:
    """One process of a driver, and all that it started."""

    pid: int
    folder: Path  # of its run
    family: dict[int, psutil.Process] = field(default_factory=dict)
    struck: bool = False

    def look(self) -> None:
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.pid).children(recursive=True):
                self.family[child.pid] = child

    def trained(self) -> int:
        """The last rollout that the ledger knows as trained, -1 without one."""
        return max((line["rollout_id"] for line in ledger.read(self.folder / "ledger.jsonl") if line["event"] == "trained"), default=-1)

    def strike(self, strike: Strike, over: threading.Event) -> None:
        """Wait for the moment, and kill; not at all if the life is over before."""
        while (found := self._victims(strike.victim) if self.trained() >= strike.after else []) == []:
            if over.wait(0.1):
                return
        if over.wait(strike.seconds):
            return
        self.look()
        self.struck = True
        for pid in found + ([child for child in self.family if child not in found] if strike.victim == ALL else []):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _victims(self, victim: str) -> list[int]:
        """By the log file, which a worker has open."""
        self.look()
        if victim in (DRIVER, ALL):
            return [self.pid]
        log = str(self.folder.absolute() / "logs" / f"{victim}.log")
        for pid in self.family:
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/2") == log:
                    return [pid]
        return []

    def left(self) -> list[str]:
        """Processes of it that are still there, after a while in which they may end by themselves."""
        deadline = time.monotonic() + GONE
        while living := [child for child in self.family.values() if _lives(child)]:
            if time.monotonic() > deadline:
                return [f"process {child.pid}: {child.name()}" for child in living]
            time.sleep(0.1)
        return []


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


class Nursery:
    """Starts runs as forks of one process that has imported everything: a run in one process then takes a second instead of ten."""

    def __init__(self) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__))]
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, driver: str, argv: list[str], folder: Path, strike: Strike | None = None) -> tuple[int, Life]:
        """The exit code of one life, -9 when the driver was killed, and what is to be known of it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([driver, argv, f"{folder}.log"]), file=self._process.stdin, flush=True)
        life, over = Life(int(self._process.stdout.readline()), folder), threading.Event()
        striker = threading.Thread(target=life.strike, args=(strike, over)) if strike is not None else None
        limit = threading.Timer(LONGEST, os.kill, (life.pid, signal.SIGABRT))
        for thread in (striker, limit):
            if thread is not None:
                thread.start()
        print("", file=self._process.stdin, flush=True)
        code = int(self._process.stdout.readline())
        over.set()
        limit.cancel()
        if striker is not None:
            striker.join()
        return code, life

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def serve() -> None:
    """The nursery's own process: a line [driver, argv, log] starts a run, an empty line asks for its exit code."""
    import torch  # noqa: PLC0415

    import miles.engines.embedded.engine  # noqa: PLC0415
    import miles.rollout.rollout_executor  # noqa: PLC0415
    import miles.train.trainer  # noqa: F401, PLC0415
    import train  # noqa: PLC0415
    import train_async  # noqa: PLC0415

    torch.set_num_threads(1)
    mains = {"train_async.py": train_async.main, "train.py": train.main}
    for line in sys.stdin:
        driver, argv, log = json.loads(line)
        pid = os.fork()
        if pid == 0:
            file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(file, 1)
            os.dup2(file, 2)
            os.setsid()
            code = 0
            try:
                mains[driver](argv)
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            except BaseException:
                code = 1
                with suppress(SystemExit):
                    sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
            os._exit(code)
        print(pid, flush=True)
        sys.stdin.readline()
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
