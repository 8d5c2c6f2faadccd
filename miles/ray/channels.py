"""The two ways to a worker: a Ray actor, or an object in this process."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayError, RayTaskError, TaskCancelledError

from miles.ray.host import Host, from_failure
from miles.ray.worker_handle import WorkerDied, WorkerRestarted
from miles.ray.worker_process import free_port
from miles.tracking.waits import Beat


class RayChannel:
    """Finds the actor by its name, so that a handle stays good when its worker is started again."""

    def __init__(self, name: str, log_path: str, namespace: str) -> None:
        self._name, self._log_path, self._namespace = name, log_path, namespace
        self._actor: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return RayChannel, (self._name, self._log_path, self._namespace)

    def point_to(self, actor: Any) -> None:
        """Called when the worker was started (again): what was known of the old one no longer holds."""
        self._actor = actor

    async def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        value, failure = await self._ask("call", method, args, kwargs)
        if failure is not None:
            raise from_failure(failure, self._name, self._log_path)
        return value

    async def construct(self, cls: str, kwargs: Mapping[str, Any]) -> None:
        _, failure = await self._ask("construct", cls, kwargs)
        if failure is not None:
            raise from_failure(failure, self._name, self._log_path)

    async def stacks(self) -> str:
        return str(await self._ask("stacks"))

    async def beat(self, with_stacks: bool) -> Beat:
        beat: Beat = await self._ask("beat", with_stacks)
        return beat

    async def open_port(self) -> tuple[str, int]:
        host, port = await self._ask("open_port")
        return host, port

    async def end_children(self) -> None:
        await self._ask("end_children")

    async def signal(self, signum: int) -> None:
        with contextlib.suppress(WorkerDied):
            await self._ask("signal_itself", signum)

    async def _ask(self, verb: str, *args: Any) -> Any:
        actor = self._actor = self._actor or self._find()
        if actor is None:
            raise WorkerDied(self._name, self._log_path, "its process has ended")
        ref = getattr(actor, verb).remote(*args)
        try:
            return await ref
        except asyncio.CancelledError:
            ray.cancel(ref)
            raise
        except TaskCancelledError:
            raise asyncio.CancelledError from None
        except RayTaskError as error:
            if isinstance(error.cause, TaskCancelledError | asyncio.CancelledError):
                raise asyncio.CancelledError from None
            raise
        except RayError as error:
            if self._actor is actor:
                self._actor = None
            successor = self._find()
            if successor is not None and successor._actor_id != actor._actor_id:
                self._actor = successor
                raise WorkerRestarted(f"{verb} of worker {self._name}: it was started again meanwhile") from None
            raise WorkerDied(self._name, self._log_path, _cause(error)) from None

    def _find(self) -> Any:
        try:
            return ray.get_actor(self._name, self._namespace)
        except ValueError:
            return None


class ProcessChannel:
    """An object in this process. `host` is None while there is none."""

    def __init__(self, name: str, log_path: str) -> None:
        self._name, self._log_path = name, log_path
        self.host: Host | None = None

    async def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return await self._living().call(method, args, kwargs)

    async def stacks(self) -> str:
        return self._living().stacks()

    async def beat(self, with_stacks: bool) -> Beat:
        return self._living().beat(with_stacks)

    async def open_port(self) -> tuple[str, int]:
        return "127.0.0.1", free_port()

    def _living(self) -> Host:
        if self.host is None:
            raise WorkerDied(self._name, self._log_path, "it was ended")
        return self.host


def _cause(error: Exception) -> str:
    """Ray's many sentences in one."""
    text = " ".join(str(error).split())
    if "ray.kill" in text:
        return "it was ended by the run"
    if isinstance(error, OutOfMemoryError) or "running low on memory" in text:
        used = re.search(r"was ([\d.]+GB used / [\d.]+GB)", text)
        return "the host ran out of memory, and Ray ended it" + (f" ({used[1]})" if used else "")
    if "connection error code 2" in text:
        return "its process was killed or crashed (a signal, or memory ran out)"
    return text[:300] or type(error).__name__
