"""Starts, restarts and ends the workers of a run: Ray actors, or objects in this process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from miles.ray import gpu_slots
from miles.ray.channels import ProcessChannel, RayChannel
from miles.ray.cluster import Cluster
from miles.ray.host import Host
from miles.ray.object_store import ProcessStore, RayStore
from miles.ray.worker_handle import CallTimeout, WorkerDied, WorkerHandle, waiting
from miles.ray.worker_process import WorkerProcess
from miles.ray.worker_spec import WorkerSpec

logger = logging.getLogger(__name__)

_MAX_CALLS = 10_000
_SLOTS_LIMIT = 60.0


@dataclass
class _Worker:
    spec: WorkerSpec
    handle: WorkerHandle
    channel: RayChannel | ProcessChannel
    actor: Any = None
    disposed: bool = False


class WorkerManager:
    """One per run, in the driver.

    Args:
        logs: folder of the workers' log files.
        shutdown_timeout: seconds that all workers together get to end by themselves.
        log_level: of the workers' loggers.
        cluster: the Ray to start actors in; None hosts everything in this process.
    """

    def __init__(self, logs: str, shutdown_timeout: float = 20.0, log_level: str = "info", cluster: Cluster | None = None) -> None:
        self._logs = Path(logs).absolute()
        self._logs.mkdir(parents=True, exist_ok=True)
        self._shutdown_timeout, self._log_level = shutdown_timeout, log_level
        self._cluster = cluster
        self._workers: dict[str, _Worker] = {}
        self._closers: list[Callable[[], Awaitable[None]]] = []
        self._group: PlacementGroup | None = None
        self._place: dict[str, int] = {}
        self._prepared: dict[str, Any] = {}
        self._shut: asyncio.Task[None] | None = None
        self.store: RayStore | ProcessStore = RayStore() if cluster else ProcessStore()

    @property
    def in_process(self) -> bool:
        return self._cluster is None

    async def reserve(self, specs: Sequence[WorkerSpec]) -> None:
        """Set aside the slots of all workers of the run, in one step.

        Raises:
            ValueError: there are not enough, with the numbers.
        """
        if self._cluster is None:
            return
        slots, self._place = gpu_slots.plan(specs)
        gpu_slots.refuse_if_too_many(slots, specs, ray.available_resources(), ray.cluster_resources())
        self._group = placement_group(gpu_slots.bundles(slots), strategy="PACK")
        try:
            await asyncio.wait_for(asyncio.wrap_future(self._group.ready().future()), _SLOTS_LIMIT)
        except TimeoutError:
            raise ValueError(
                f"no room for the slots {gpu_slots.bundles(slots)} within {_SLOTS_LIMIT:g} s: {ray.available_resources()} is free, "
                "but not on one node as each slot needs it"
            ) from None

    async def start(self, spec: WorkerSpec) -> WorkerHandle:
        """Start one worker and build its object. Raises what its constructor raises; nothing of it stays then."""
        assert spec.name not in self._workers, f"worker {spec.name} is there already"
        log_path = self.log_path(spec)
        channel: RayChannel | ProcessChannel
        channel = (
            RayChannel(spec.name, log_path, self._cluster.namespace) if self._cluster is not None else ProcessChannel(spec.name, log_path)
        )
        handle = WorkerHandle(spec.name, log_path, channel, spec.limits, spec.default_limit)
        worker = self._workers[spec.name] = _Worker(spec, handle, channel)
        try:
            await self._bring_up(worker)
        except BaseException:
            await self._end(worker)
            del self._workers[spec.name]
            raise
        return handle

    def prepare(self, specs: Sequence[WorkerSpec]) -> None:
        """Start the processes of workers that `start` will want later, and let them import what they need meanwhile."""
        if self._cluster is None:
            return
        for spec in specs:
            actor = self._prepared[spec.name] = self._actor(spec, self.log_path(spec))
            actor.import_class.remote(spec.cls)

    async def start_all(self, specs: Sequence[WorkerSpec]) -> list[WorkerHandle]:
        """Start several side by side; the first failure is raised."""
        return list(await all_or_first_error([self.start(spec) for spec in specs]))

    async def restart(self, name: str) -> WorkerHandle:
        """End a worker, whatever its state, and start it anew. Handles that others hold stay good."""
        worker = self._workers[name]
        await self.end(name)
        worker.disposed = False
        await self._bring_up(worker)
        return worker.handle

    async def end(self, name: str) -> None:
        """End one worker at once, without asking it. Idempotent."""
        worker = self._workers[name]
        worker.disposed = True
        await self._end(worker)

    async def signal(self, name: str, signum: int) -> None:
        """Send a signal to a worker's process. Raises ValueError for a worker in this process."""
        channel = self._workers[name].channel
        if isinstance(channel, ProcessChannel):
            raise ValueError(f"worker {name} has no process of its own (--in-process)")
        await channel.signal(signum)

    @property
    def handles(self) -> list[WorkerHandle]:
        """Of all workers that there are."""
        return [worker.handle for worker in self._workers.values()]

    def spec(self, name: str) -> WorkerSpec | None:
        """Of a worker that is there or being started."""
        worker = self._workers.get(name)
        return None if worker is None else worker.spec

    @property
    def hosts(self) -> list[Host]:
        """The workers that live in this process. May be asked for from any thread."""
        channels = [worker.channel for worker in list(self._workers.values())]
        return [channel.host for channel in channels if isinstance(channel, ProcessChannel) and channel.host is not None]

    async def stacks(self) -> str:
        """The stacks of all workers."""
        return "\n\n".join(await asyncio.gather(*(worker.handle.worker_stacks() for worker in self._workers.values())))

    def on_shutdown(self, closer: Callable[[], Awaitable[None]]) -> None:
        """`closer` is called first at shutdown, in the order of registration, each once. It must be idempotent."""
        self._closers.append(closer)

    async def shutdown(self) -> None:
        """End everything: closers, then the workers' `dispose`, then whatever still lives. Idempotent; never raises."""
        if self._shut is None:
            self._shut = asyncio.get_running_loop().create_task(self._shut_down(), name="shutdown")
        await asyncio.shield(self._shut)

    async def dispose_worker(self, handle: WorkerHandle) -> None:
        """Ask a worker to end by itself, once."""
        worker = self._workers.get(handle.worker_name)
        if worker is None or worker.disposed:
            return
        worker.disposed = True
        await handle.dispose()

    async def _bring_up(self, worker: _Worker) -> None:
        spec = worker.spec
        if isinstance(worker.channel, ProcessChannel):
            worker.channel.host = Host(spec.name)
            build: Coroutine[Any, Any, None] = worker.channel.host.construct(spec.cls, spec.kwargs)
        else:
            worker.actor = self._prepared.pop(spec.name, None) or self._actor(spec, worker.handle.worker_log)
            worker.channel.point_to(worker.actor)
            build = worker.channel.construct(spec.cls, spec.kwargs)
        task = asyncio.ensure_future(build)
        try:
            with waiting(spec.name, "start"):
                done, _ = await asyncio.wait({task}, timeout=spec.start.seconds)
            if not done:
                text = await worker.handle.worker_stacks()
                limit = f"{spec.start.seconds:g} s ({spec.start.setting})"
                raise CallTimeout(f"worker {spec.name} was not up within {limit}; log: {worker.handle.worker_log}\n{text}")
            task.result()
        finally:
            task.cancel()  # another worker's failure may end this wait

    def log_path(self, spec: WorkerSpec) -> str:
        """Where a worker's output goes."""
        return str(self._logs / f"{spec.name}.log")

    def _actor(self, spec: WorkerSpec, log_path: str) -> Any:
        assert self._cluster is not None
        strategy: Any = "DEFAULT"
        if self._group is not None and spec.name in self._place:
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._place[spec.name])
        make_remote: Any = ray.remote(concurrency_groups={"watch": 8})  # type: ignore[call-overload]
        return (
            make_remote(WorkerProcess)
            .options(
                name=spec.name,
                namespace=self._cluster.namespace,
                num_cpus=spec.num_cpus,
                num_gpus=spec.num_gpus,
                max_concurrency=_MAX_CALLS,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=strategy,
                runtime_env={"env_vars": {**self._cluster.env(), **spec.env}},
            )
            .remote(spec.name, log_path, os.getcwd(), list(sys.path), self._log_level)
        )

    async def _end(self, worker: _Worker) -> None:
        if isinstance(worker.channel, ProcessChannel):
            if worker.channel.host is not None:
                worker.channel.host.close()
                worker.channel.host = None
            return
        if worker.actor is None:
            return
        with contextlib.suppress(TimeoutError, WorkerDied, Exception):
            await asyncio.wait_for(worker.channel.end_children(), 3.0)
        with contextlib.suppress(Exception):
            ray.kill(worker.actor, no_restart=True)
        worker.actor = None

    async def _shut_down(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._shutdown_timeout
        for closer in self._closers:
            await _bounded(closer(), (deadline - loop.time()) / 2, "closing")  # something is left for those that come after
        left = [worker for worker in self._workers.values() if not worker.disposed]
        await asyncio.gather(*(_bounded(self.dispose_worker(w.handle), deadline - loop.time(), w.spec.name) for w in left))
        await asyncio.gather(*(self._end(worker) for worker in self._workers.values()))
        self._workers.clear()
        for actor in self._prepared.values():
            with contextlib.suppress(Exception):
                ray.kill(actor, no_restart=True)
        self._prepared.clear()
        if self._cluster is not None:
            if self._group is not None:
                with contextlib.suppress(Exception):
                    remove_placement_group(self._group)
            self._cluster.leave()


async def all_or_first_error(calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Await all; when one fails the others are cancelled and awaited, and its error is raised."""
    if len(calls) == 1:
        return [await calls[0]]
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION) if tasks else None
        failed = next((task for task in tasks if task.done() and not task.cancelled() and task.exception()), None)
        if failed is not None:
            failed.result()
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _bounded(awaitable: Awaitable[Any], seconds: float, what: str) -> None:
    """One step of the shutdown: bounded, and without a word to the user unless asked for."""
    try:
        await asyncio.wait_for(awaitable, max(seconds, 0.1))
    except (Exception, asyncio.CancelledError) as error:
        logger.debug("shutdown, %s: %s: %s", what, type(error).__name__, error)
