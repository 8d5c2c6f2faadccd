"""Processes that run a sync reward function under hard limits: what hangs is killed, what dies is replaced, nobody else waits."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pickle
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from miles.rewards.frames import receive, send
from miles.types import Sample

logger = logging.getLogger(__name__)

STACK_PAUSE = 0.1
"""Seconds without another word from a hanging worker's signal handler after which its stack is taken as complete."""
START_TIMEOUT = 120.0
"""Seconds that a worker may take to import the user's module."""


class FunctionError(RuntimeError):
    """The function raised. `report` is its traceback."""

    def __init__(self, message: str, report: str = ""):
        super().__init__(message)
        self.report = report


class FullError(FunctionError):
    """The function found no more memory; after that its process is replaced."""


class LimitError(FunctionError):
    """The function took longer than its limit and was killed. `report` says where it was."""


class WorkerDiedError(FunctionError):
    """The process died in the middle of the function, twice: a crash, or the kernel ended it for its memory."""


@dataclass(frozen=True, slots=True)
class PoolSpec:
    path: str  # dotted path of the function, or of a class constructed with `args`
    args: Any
    timeout: float  # seconds of one call, counted from its start, not from its wait in the queue
    memory_gb: float


class RewardPool:
    """`num_workers` processes, each kept by a thread here that hands it one sample at a time.

    A future tells the result, so any thread and any event loop can wait for it. A worker starts with its first sample.
    """

    def __init__(self, spec: PoolSpec, num_workers: int):
        self._spec = spec
        self._tasks: queue.SimpleQueue[tuple[Sample, Future[Any]] | None] = queue.SimpleQueue()
        self._closed = False
        self._workers = [_Worker(spec) for _ in range(num_workers)]
        self._keepers = [threading.Thread(target=self._keep, args=(w,), daemon=True, name="reward-keeper") for w in self._workers]
        for keeper in self._keepers:
            keeper.start()

    def submit(self, sample: Sample) -> Future[Any]:
        """The future raises FunctionError, LimitError or WorkerDiedError."""
        if self._closed:
            raise RuntimeError("the reward pool is closed")
        future: Future[Any] = Future()
        self._tasks.put((sample, future))
        return future

    def close(self) -> None:
        """Kill the workers and wait for their keepers. Calls under way end with WorkerDiedError. Idempotent."""
        self._closed = True
        for worker in self._workers:
            worker.close()
        for _ in self._keepers:
            self._tasks.put(None)
        for keeper in self._keepers:
            keeper.join(10.0)

    def pids(self) -> list[int]:
        """Process ids of the living workers."""
        return [pid for worker in self._workers if (pid := worker.pid()) is not None]

    def _keep(self, worker: _Worker) -> None:
        while (task := self._tasks.get()) is not None:
            sample, future = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = worker.call(sample)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
        worker.end()


class _Worker:
    """One process and our end of its socket. `close` may come from another thread; the rest is its keeper's."""

    def __init__(self, spec: PoolSpec):
        self._spec = spec
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._pipes: list[int] = []  # [the write end whose closing tells the process that we are gone, the read end of its stack]
        self._closed = False

    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def call(self, sample: Sample) -> Any:
        """Run the function on one sample. A process that dies under it, or is full of what earlier calls left, is replaced and the
        call made once more."""
        for last_try in (False, True):
            fresh = self._channel is None
            channel = self.start()
            try:
                channel.settimeout(self._spec.timeout)
                send(channel, pickle.dumps((self._spec.timeout, sample)))
                return self._answer(channel)
            except TimeoutError:
                where = self._stack()
                self.end()
                raise LimitError(f"took longer than --reward-timeout {self._spec.timeout:g} s; its process was killed", where) from None
            except FullError:
                self.end()
                if last_try or fresh:
                    raise
                logger.warning("a reward process has reached --reward-memory-gb; replaced, and its sample is scored again")
            except (EOFError, ConnectionError):
                how = self.end()
                if last_try or self._closed:
                    raise WorkerDiedError(f"its process died ({how})") from None
                logger.warning("a reward process died (%s); replaced, and its sample is scored again", how)
        raise AssertionError("unreachable")

    def _answer(self, channel: socket.socket) -> Any:
        kind, value, report = pickle.loads(receive(channel))
        if kind == "full":
            raise FullError(value, report)
        if kind == "error":
            raise FunctionError(value, report)
        return value

    def start(self) -> socket.socket:
        """A running process that has loaded the function."""
        if self._channel is not None:
            return self._channel
        ours, theirs = socket.socketpair()
        life_read, life_write = os.pipe()
        stack_read, stack_write = os.pipe()
        fds = (theirs.fileno(), life_read, stack_write)
        with self._lock:
            if self._closed:
                raise WorkerDiedError("the reward pool is closed")
            # -c, not -m: the package of this very process, wherever it was imported from
            code = f"import sys; sys.path[:] = {sys.path!r}; from miles.rewards.worker import main; main{fds}"
            self._process = subprocess.Popen([sys.executable, "-c", code], pass_fds=fds, start_new_session=True, stdin=subprocess.DEVNULL)
            self._pipes = [life_write, stack_read]
        theirs.close()
        os.close(life_read)
        os.close(stack_write)
        ours.settimeout(START_TIMEOUT)
        start = {"path": self._spec.path, "args": self._spec.args, "memory_gb": self._spec.memory_gb}
        try:
            send(ours, pickle.dumps(start))
            self._answer(ours)
        except (TimeoutError, EOFError, ConnectionError, FunctionError) as error:
            ours.close()
            how = self.end()
            if isinstance(error, FunctionError):
                raise
            raise WorkerDiedError(f"a reward process did not start ({how}): {error}") from None
        self._channel = ours
        return ours

    def _stack(self) -> str:
        """Where the process is, from its signal handler; "" when it does not say."""
        process = self._process
        if process is None or process.poll() is not None:
            return ""
        process.send_signal(signal.SIGUSR1)
        said = b""
        while select.select([self._pipes[1]], [], [], STACK_PAUSE)[0] and (part := os.read(self._pipes[1], 1 << 16)):
            said += part
        lines = said.decode(errors="replace").splitlines()[1:]
        frames = list(itertools.takewhile(lambda line: "miles/rewards/worker.py" not in line, lines))
        return "It was at (most recent call first):\n" + "\n".join(frames) if frames else ""

    def end(self) -> str:
        """Kill the process and what it started; returns how it had ended, if it had."""
        with self._lock:
            process, self._process = self._process, None
            channel, self._channel = self._channel, None
            pipes, self._pipes = self._pipes, []
        if channel is not None:
            channel.close()
        for pipe in pipes:
            os.close(pipe)
        if process is None:
            return "closed"
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.2)  # an end of its own has a better exit code than ours
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def close(self) -> None:
        with self._lock:
            self._closed = True
            process = self._process
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
