"""The server's process: started in a group of its own, watched, and ended with us, however we end."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from miles.engines.sglang.client import Client, ServerRefused
from miles.engines.sglang.launcher import LOADER, WATCH, end_group, mapped_files
from miles.engines.sglang.options import ENVIRONMENT, flags
from miles.protocols import ProcessGone

logger = logging.getLogger(__name__)

LAUNCHER = Path(__file__).with_name("launcher.py")
READY = "/model_info"  # answered once the model is loaded; /ready is younger than some versions
FACTS = "/server_info"
LOOK_SECONDS = 0.25
PORTS = range(20000, 32000)
TRACKER_SECONDS = 2.0  # for the resource tracker to clean up
TAIL = 25  # lines of the log in an error


class ServerGone(ProcessGone):
    """The server's process has ended. Nothing comes of this engine until it is started again."""


def server_version(python: str) -> str:
    """The version of SGLang that an interpreter has.

    Raises:
        ValueError: it has none, or is no interpreter.
    """
    if python == sys.executable and importlib.util.find_spec("sglang") is None:
        raise ValueError(_missing(python, "No module named 'sglang'"))
    code = "import importlib.metadata as m; print(m.version('sglang')); m.version('xxhash')"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    except OSError as error:
        raise ValueError(f"--sglang-python {python}: {error.strerror}") from None
    if done.returncode:
        raise ValueError(_missing(python, done.stderr.strip().splitlines()[-1]))
    return done.stdout.strip()


def _missing(python: str, reason: str) -> str:
    return (
        f"--engine sglang: {python} cannot run it ({reason}). Give an interpreter that has sglang and xxhash with --sglang-python; "
        "`make sglang-cpu` makes one for CPUs, .venv-sglang/bin/python"
    )


async def facts_of(url: str, client: Client, max_context: int) -> dict[str, Any]:
    """What a server that runs already says of itself.

    Raises:
        ValueError: there is none, or none that can serve this run.
    """
    try:
        facts = dict(await client.get(FACTS))
    except (OSError, ServerRefused, ValueError) as error:
        raise ValueError(f"--sglang-urls {url}: no SGLang server answers there: {error!r}") from error
    if LOADER not in (facts.get("custom_weight_loader") or []):
        raise ValueError(f"--sglang-urls {url}: that server was not started by miles' launcher, so weights cannot be published to it")
    if (length := facts.get("context_length")) and length < max_context:
        raise ValueError(f"--sglang-urls {url}: that server has a context of {length} tokens, less than --engine-max-context {max_context}")
    return facts


class Server:
    """One server process and all that it starts.

    Args:
        python: the interpreter.
        options: the server's options without an address, see `options.py`.
        log_path: what it prints goes here.
        environment: added to ours.
    """

    def __init__(self, python: str, options: Mapping[str, Any], log_path: Path, environment: dict[str, str]) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._shared_memory: set[Path] = set()
        self._scratch = Path(tempfile.mkdtemp(prefix="miles-sglang-"))  # its sockets and the like
        words: Sequence[str] = [
            python,
            str(LAUNCHER),
            WATCH,
            str(self._scratch),
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            *flags(options),
        ]
        logger.info("starting SGLang: %s", " ".join(words[1:]))
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,  # closed when this process is gone: then the server ends itself
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | ENVIRONMENT | {"TMPDIR": str(self._scratch)} | environment,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Raises ServerGone, with the end of its log, when the process has ended; what it left behind is removed."""
        code = self._process.poll()
        if code is not None:
            tail = self.tail()
            self.kill()
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise ServerGone(f"the SGLang server has ended ({how}). Its log is {self.log_path}; the last lines:\n{tail}")

    async def ready(self, client: Client, timeout: float, limit: str) -> None:
        """Wait until it answers.

        Args:
            timeout: seconds.
            limit: what sets them, for the error.

        Raises:
            ServerGone: it ended before.
            TimeoutError: with the end of its log.
        """
        deadline = time.monotonic() + timeout
        while True:
            self.check()
            with contextlib.suppress(OSError, ServerRefused):
                await client.get(READY, timeout=5)
                self._shared_memory = self._mapped()
                return
            if time.monotonic() > deadline:
                told = f"SGLang was not ready within {limit}: {self._progress()}. Its log is {self.log_path}; the last lines:"
                raise TimeoutError(f"{told}\n{self.tail()}")
            await asyncio.sleep(LOOK_SECONDS)

    def _progress(self) -> str:
        """Whether a server that is late has been at work, or waits for something."""
        cpu = 0.0
        with contextlib.suppress(psutil.Error):  # one ends just now
            for process in self._family():
                times = process.cpu_times()
                cpu += times.user + times.system
        silent = time.time() - self.log_path.stat().st_mtime
        return f"its processes have computed for {cpu:.0f} s, and its log has not grown for {silent:.0f} s"

    def _family(self) -> list[psutil.Process]:
        parent = psutil.Process(self.pid)
        return [parent, *parent.children(recursive=True)]

    def _mapped(self) -> set[Path]:
        return {path for process in self._family() for path in mapped_files(Path(f"/proc/{process.pid}"))}

    def tail(self) -> str:
        try:
            with self.log_path.open(errors="replace") as log:
                lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in deque(log, TAIL)]
        except OSError as error:
            return f"  (cannot be read: {error})"
        return "".join("  " + line for line in lines).rstrip()

    def kill(self) -> None:
        """End the whole group at once, and remove what it had in shared memory. Idempotent."""
        if self._process.returncode is None or self._shared_memory:
            end_group(self.pid)
            deadline = time.monotonic() + TRACKER_SECONDS
            while _lives(self.pid) and time.monotonic() < deadline:
                self._process.poll()
                time.sleep(0.02)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        for path in self._shared_memory:  # of a server that ended by itself nobody has it mapped any more
            path.unlink(missing_ok=True)
        self._shared_memory = set()
        shutil.rmtree(self._scratch, ignore_errors=True)


def _lives(group: int) -> bool:
    """Whether a process group has more than zombies, which only their parents can remove."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def free_port() -> int:
    """SGLang takes ports up to 10,000 above its own, and the system hands out high ones to whoever asks."""
    for port in random.SystemRandom().sample(PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"no port from {PORTS.start} to {PORTS.stop - 1} is free for an SGLang server")
