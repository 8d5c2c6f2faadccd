"""The one Ray actor class: a process of its own around a `Host`."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import ray

from miles.ray import processes
from miles.ray.heartbeat import Heartbeat
from miles.ray.host import Failure, Host, to_failure
from miles.tracking import logs, run_folder
from miles.tracking.waits import Beat


class WorkerProcess:
    """Hosts one plain class. What it returns is (value, None) or (None, failure): Ray's own wrapping hides the user's traceback.

    Methods of the group "watch" run on an event loop and thread of their own, so they answer whatever the worker does.
    """

    def __init__(self, name: str, log_path: str, directory: str, sys_path: Sequence[str], log_level: str) -> None:
        _to_file(log_path)
        gc.disable()  # what libraries make while they are imported stays: to look through it again and again takes a fifth of the time
        if Path(directory).is_dir():  # a joined cluster's node may not have it
            os.chdir(directory)
        sys.path[:] = list(dict.fromkeys([*sys_path, *sys.path]))
        logs.setup(log_level)
        run_folder.share(Path(log_path).parents[1])
        self._host = Host(name)
        Heartbeat(Path(log_path).parent, lambda with_stacks: [self._host.beat(with_stacks)], name).start()

    async def construct(self, cls: str, kwargs: Mapping[str, Any]) -> tuple[None, Failure | None]:
        try:
            await self._host.construct(cls, kwargs)
        except BaseException as error:
            return None, to_failure(error)
        finally:
            gc.freeze()
            gc.enable()
        return None, None

    async def import_class(self, cls: str) -> None:
        """Ahead of `construct`, which says what is wrong with it."""
        with contextlib.suppress(Exception):
            await self._host.import_class(cls)

    async def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Failure | None]:
        try:
            return await self._host.call(method, args, kwargs), None
        except Exception as error:
            return None, to_failure(error)
        except SystemExit as error:
            return None, to_failure(error)

    @ray.method(concurrency_group="watch")
    async def stacks(self) -> str:
        return self._host.stacks()

    @ray.method(concurrency_group="watch")
    async def beat(self, with_stacks: bool) -> Beat:
        return self._host.beat(with_stacks)

    @ray.method(concurrency_group="watch")
    async def open_port(self) -> tuple[str, int]:
        return ray.util.get_node_ip_address(), free_port()

    @ray.method(concurrency_group="watch")
    async def signal_itself(self, signum: int) -> None:
        """Soon, so that the answer to this call still leaves."""
        asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signum)

    @ray.method(concurrency_group="watch")
    async def end_children(self) -> list[str]:
        """Called last, before this process is ended: nothing it started may stay."""
        return processes.end(psutil.Process().children(recursive=True), grace=1.0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _to_file(path: str) -> None:
    """Everything this process writes, native code included, goes to `path`."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(2)
