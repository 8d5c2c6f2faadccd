"""Owns the engines' life: awake, paused, watched, suspended, started again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from miles.config.run_config import RunConfig
from miles.protocols import Engine
from miles.ray.run import Run
from miles.ray.worker_handle import WorkerDied, WorkerHandle
from miles.ray.worker_manager import all_or_first_error

logger = logging.getLogger(__name__)

Phase = Literal["Pending", "Running", "Suspended"]
_CONTROL_RETRIES = 2


@dataclass
class Cell:
    """One engine. Pending: started, and without the run's weights yet. It serves when Running and healthy."""

    name: str
    handle: WorkerHandle
    phase: Phase = "Pending"
    healthy: bool | None = None  # None: not known yet
    reason: str = "Starting"
    weight_version: int = 0
    failures: int = 0
    dead: bool = False
    since: float = 0.0

    @property
    def engine(self) -> Engine:
        return cast(Engine, self.handle)

    @property
    def lives(self) -> bool:
        return self.phase != "Suspended" and not self.dead


class InferenceController:
    """One per run, in the driver.

    One lock serialises publishes, suspends, resumes and fault injection: a publish never meets an engine that comes or goes.
    """

    def __init__(self, args: RunConfig, run: Run, engines: Sequence[WorkerHandle]) -> None:
        self.args, self._run = args, run
        self.cells = {handle.worker_name: Cell(handle.worker_name, handle, since=time.time()) for handle in engines}
        self._lock = asyncio.Lock()
        self._watching = False
        self._probes: asyncio.Task[None] | None = None
        self._offloaded = False
        self._publishing: list[Cell] = []

    async def init(self) -> None:
        """Bring up all engines, side by side. Past its limit, or on its first error, the run ends and names the log."""
        await self._run.guard.watch(all_or_first_error([cell.engine.init() for cell in self.cells.values()]))
        self._probes = asyncio.get_running_loop().create_task(self._probe_for_ever(), name="health probes")

    @property
    def engines(self) -> list[Engine]:
        return [cell.engine for cell in self.cells.values()]

    async def prepare_rollout(self, rollout_id: int) -> None:
        """Engines awake and watched. Called before each rollout is asked for."""
        await self._run.guard.halt_if_asked()
        await self.onload()
        self._watching = True

    async def prepare_eval(self) -> None:
        """As `prepare_rollout`, before an evaluation."""
        await self._run.guard.halt_if_asked()
        await self.onload()
        self._watching = True

    async def start_update_weights(self) -> list[Engine]:
        """Take the lock, leave the engines unwatched, pause those that live. Returns them."""
        await self._lock.acquire()
        try:
            if self._offloaded:
                await self._onload()
            self._publishing = [cell for cell in self.cells.values() if cell.lives]
            await self._each(self._publishing, "pause", self.args.pause_mode)
            self._publishing = [cell for cell in self._publishing if cell.lives]
            if not self._publishing:
                raise RuntimeError("no engine is left to publish to:\n" + "\n".join(f"{c.name}: {c.reason}" for c in self.cells.values()))
        except BaseException:
            self._lock.release()
            raise
        return [cell.engine for cell in self._publishing]

    async def end_update_weights(self, weight_version: int) -> None:
        """The engines serve the new weights; engines that were started again serve from here on."""
        try:
            for cell in self._publishing:
                assert weight_version >= cell.weight_version, "versions never go backwards"
                cell.weight_version, cell.phase, cell.reason = weight_version, "Running", "Serving"
            await self._each(self._publishing, "resume")
        finally:
            self._publishing = []
            self._lock.release()

    async def abort_update_weights(self) -> None:
        """A publish failed: note who died, let go of the lock. Engines with half a publish serve nothing until a whole one."""
        try:
            for cell in self._publishing:
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(cell.engine.health(), self.args.health_timeout)
                    continue
                self._mark_dead(cell, "did not answer after a failed publish")
            await self._each([cell for cell in self._publishing if cell.lives], "resume")
        finally:
            self._publishing = []
            self._lock.release()

    async def check_weights(
        self, action: str, allow_quant_error: bool = False, selector: str = "all", skip_list: Sequence[str] = ()
    ) -> dict[str, dict[str, str]]:
        """snapshot, reset_tensors, compare or checksum, on every engine that serves. Engine name -> its answer.

        Raises:
            ValueError: compare found tensors that differ; they are listed.
        """
        if action not in ("snapshot", "reset_tensors", "compare", "checksum"):
            raise ValueError(f"check_weights knows snapshot, reset_tensors, compare and checksum, not {action!r}")
        async with self._lock:
            cells = [cell for cell in self.cells.values() if cell.lives]
            options = {"allow_quant_error": allow_quant_error, "selector": selector, "skip_list": list(skip_list)}
            answers = await self._run.guard.watch(
                all_or_first_error([cell.engine.check_weights(action, **options) for cell in cells])  # type: ignore[arg-type]
            )
        found = {cell.name: answer for cell, answer in zip(cells, answers, strict=True)}
        if action == "compare":
            self._report_differences(found, skip_list)
        return found

    def _report_differences(self, found: dict[str, dict[str, str]], skip_list: Sequence[str]) -> None:
        wrong = []
        for name, differing in found.items():
            for tensor, how in differing.items():
                if any(part in tensor for part in skip_list):
                    logger.warning("%s of %s differs, and is on the skip list: %s", tensor, name, how)
                else:
                    wrong.append(f"{name}: {tensor}: {how}")
        if wrong:
            raise ValueError(f"{len(wrong)} tensors of the engines differ from what they loaded:\n" + "\n".join(wrong[:50]))
        logger.info("the weights of %d engines are equal to those they loaded", len(found))

    async def suspend(self, name: str) -> None:
        """End one engine. Waits for a publish that is going on. Idempotent."""
        async with self._lock:
            cell = self._cell(name)
            await self._run.manager.end(name)
            cell.phase, cell.healthy, cell.reason, cell.dead = "Suspended", None, "Suspended", False
            cell.since = time.time()

    async def resume(self, name: str) -> None:
        """Start a suspended engine again. It serves from the next publish on, when it has the run's weights."""
        async with self._lock:
            cell = self._cell(name)
            if cell.phase != "Suspended":
                return
            await self._run.manager.restart(name)
            await cell.engine.init()
            await cell.engine.pause(self.args.pause_mode)
            cell.phase, cell.healthy, cell.reason, cell.failures, cell.weight_version = "Pending", None, "WaitsForWeights", 0, 0
            cell.since = time.time()

    async def offload(self) -> None:
        """The engines leave the device to the trainer. Idempotent."""
        async with self._lock:
            if not self._offloaded:
                self._watching = False
                await self._each([cell for cell in self.cells.values() if cell.lives], "offload")
                self._offloaded = True

    async def onload(self) -> None:
        """Back on the device. Idempotent."""
        if self._offloaded:
            async with self._lock:
                await self._onload()

    async def dispose(self) -> None:
        """End probes and engines. Idempotent."""
        self._watching = False
        if self._probes is not None:
            self._probes.cancel()
            await asyncio.gather(self._probes, return_exceptions=True)
        await asyncio.gather(*(self._run.manager.dispose_worker(cell.handle) for cell in self.cells.values() if cell.lives))

    def _cell(self, name: str) -> Cell:
        if name not in self.cells:
            raise KeyError(f"no cell {name!r}; there are {', '.join(self.cells)}")
        return self.cells[name]

    async def _onload(self) -> None:
        if self._offloaded:
            await self._each([cell for cell in self.cells.values() if cell.lives], "onload")
            self._offloaded = False

    async def _each(self, cells: Sequence[Cell], method: str, *args: object) -> None:
        """One control call on several engines; a passing fault is tried again, a dead engine is noted and left out."""

        async def one(cell: Cell) -> None:
            for attempt in range(_CONTROL_RETRIES + 1):
                try:
                    await getattr(cell.handle, method)(*args)
                    return
                except WorkerDied as error:
                    self._mark_dead(cell, str(error))
                    return
                except Exception:
                    if attempt == _CONTROL_RETRIES:
                        raise
                    logger.warning("%s of %s failed and is tried again", method, cell.name, exc_info=True)
                    await asyncio.sleep(0.2 * 2**attempt)

        await all_or_first_error([one(cell) for cell in cells])

    def _mark_dead(self, cell: Cell, reason: str) -> None:
        if cell.dead:
            return
        cell.dead, cell.healthy, cell.reason = True, False, reason
        logger.error("%s is lost: %s", cell.name, reason)
        self._end_run_if_none_is_left()

    def _end_run_if_none_is_left(self) -> None:
        """Without a healing controller nobody starts an engine again, so waiting for one would be for ever."""
        if self.args.mini_ft_controller or self.args.api_server_port:
            return
        if not any(cell.phase != "Suspended" and not cell.dead and cell.healthy is not False for cell in self.cells.values()):
            reasons = "\n".join(f"{cell.name}: {cell.reason}" for cell in self.cells.values())
            self._run.guard.fail(RuntimeError(f"no engine is left that works:\n{reasons}"))

    async def _probe_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self.args.health_interval)
            if self._watching and not self._lock.locked():
                await asyncio.gather(*(self._probe(cell) for cell in self.cells.values() if cell.phase == "Running" and not cell.dead))

    async def _probe(self, cell: Cell) -> None:
        """One look. An engine counts as unhealthy after several bad ones in a row, and as dead when its process is gone."""
        try:
            health = await cell.engine.health()
            stuck = health.stuck_seconds > self.args.engine_stuck_timeout and not health.paused
            problem = "" if health.healthy and not stuck else health.reason or f"no token for {health.stuck_seconds:.0f} s"
        except WorkerDied as error:
            self._mark_dead(cell, str(error))
            return
        except Exception as error:
            problem = str(error)
        if not problem:
            cell.failures, cell.healthy, cell.reason = 0, True, "Serving"
            return
        cell.failures += 1
        logger.warning("health probe %d of %s: %s", cell.failures, cell.name, problem)
        if cell.failures >= self.args.health_failures and cell.healthy is not False:
            cell.healthy, cell.reason = False, problem
            logger.error("%s is unhealthy: %s\n%s", cell.name, problem, await cell.handle.worker_stacks())
            self._end_run_if_none_is_left()
