"""What is done to the engines, one thing at a time: publishes, taking turns on the device, suspends and resumes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable, Sequence

from miles.config.run_config import RunConfig
from miles.fault_tolerance.cells import Cell, FaultKind
from miles.protocols import Engine
from miles.ray.rollout.engine_cells import PASSING, EngineCell, EngineCells, TellLive
from miles.ray.run import Run
from miles.ray.worker_handle import WorkerDied, WorkerHandle
from miles.ray.worker_manager import all_or_first_error

logger = logging.getLogger(__name__)

Republish = Callable[[Engine], Awaitable[int]]


class InferenceController:
    """One per run, in the driver. A `CellOwner`: each engine is a cell of the control API.

    One lock serialises publishes, suspends, fault injection and the moment in which a resumed engine joins: a publish never meets
    an engine that comes or goes.
    """

    def __init__(self, args: RunConfig, run: Run, engines: Sequence[WorkerHandle]) -> None:
        self.args, self._run = args, run
        self._cells = EngineCells(args, run, engines)
        self._lock = asyncio.Lock()
        self._revived = asyncio.Event()  # an engine was started again
        self._offloaded = False
        self._publishing: list[EngineCell] = []
        self._republish: Republish | None = None

    async def init(self) -> None:
        """Bring up all engines, side by side. Past its limit, or on its first error, the run ends and names the log."""
        await self._cells.init()

    @property
    def engines(self) -> list[Engine]:
        return [cell.engine for cell in self._cells]

    def cells(self) -> list[Cell]:
        return [cell.state.view() for cell in self._cells]

    def on_resume(self, republish: Republish) -> None:
        """`republish(engine)` publishes the current weights to one engine, and returns their version."""
        self._republish = republish

    def on_live(self, tell: TellLive) -> None:
        """`tell(index, live)` is awaited when an engine stops serving, or serves again."""
        self._cells.on_live(tell)

    async def prepare_rollout(self, rollout_id: int) -> None:
        """Engines awake and watched. Called before each rollout is asked for."""
        await self._run.guard.halt_if_asked()
        await self.onload()

    async def prepare_eval(self) -> None:
        """As `prepare_rollout`, before an evaluation."""
        await self._run.guard.halt_if_asked()
        await self.onload()

    async def start_update_weights(self) -> list[Engine]:
        """Take the lock. Returns the engines that live; they go on until `pause_engines`.

        Where none lives, but the control API may start one again, that is waited for, within --engine-start-timeout.
        """
        while True:
            self._revived.clear()
            await self._lock.acquire()
            try:
                await self._onload()
                self._publishing = self._cells.living
            except BaseException:
                self._lock.release()
                raise
            if self._publishing:
                return [cell.engine for cell in self._publishing]
            self._lock.release()
            await self._wait_for_one()

    async def pause_engines(self) -> list[Engine]:
        """Pause the engines of the publish, and leave them unwatched. Returns those that live."""
        await self._pause([cell for cell in self._publishing if cell.lives])
        self._publishing = [cell for cell in self._publishing if cell.lives]
        return [cell.engine for cell in self._publishing]

    async def _wait_for_one(self) -> None:
        problem = f"no engine is left to publish to:\n{self._cells.problems()}"
        if not self.args.api_server_port:
            raise RuntimeError(problem)
        logger.warning("no engine is left to publish to: waiting for one to be started again")
        try:
            await asyncio.wait_for(self._revived.wait(), self.args.engine_start_timeout)
        except TimeoutError:
            raise RuntimeError(
                f"{problem}\nand none came back within --engine-start-timeout {self.args.engine_start_timeout:g} s"
            ) from None

    async def end_update_weights(self, weight_version: int) -> None:
        """The engines serve the new weights; engines that were started again serve from here on."""
        try:
            await self._serve(self._publishing, weight_version)
        finally:
            self._publishing = []
            self._lock.release()

    async def abort_update_weights(self) -> None:
        """A publish failed: note who died, let go of the lock. An engine with half a publish serves nothing until a whole one."""
        try:
            for cell in self._publishing:
                with contextlib.suppress(*PASSING):
                    try:
                        await cell.engine.health()
                    except WorkerDied as error:
                        self._cells.lose(cell, str(error))
            await self._resume_engines([cell for cell in self._publishing if cell.lives])
        finally:
            self._publishing = []
            self._lock.release()

    async def _pause(self, cells: Sequence[EngineCell]) -> None:
        for cell in cells:
            cell.judge.pause()
            cell.state.change(serving=("False", "paused for a publish"))
        await self._cells.each(cells, "pause", self.args.pause_mode)

    async def _serve(self, cells: Sequence[EngineCell], weight_version: int) -> None:
        for cell in cells:
            assert weight_version >= cell.weight_version, "versions never go backwards"
            cell.weight_version = weight_version
        await self._resume_engines([cell for cell in cells if cell.lives])
        for cell in cells:
            if cell.lives:
                cell.state.change(phase="Running", serving=("True", ""), weight_version=weight_version)
                self._cells.set_live(cell, True)

    async def _resume_engines(self, cells: Sequence[EngineCell]) -> None:
        await self._cells.each(cells, "resume")
        for cell in cells:
            cell.judge.resume()

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
            cells = self._cells.living
            options = {"allow_quant_error": allow_quant_error, "selector": selector, "skip_list": list(skip_list)}
            answers = await self._run.guard.watch(all_or_first_error([cell.handle.check_weights(action, **options) for cell in cells]))
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

    async def suspend_cell(self, name: str) -> None:
        """End one engine. Waits for a publish that is under way. Idempotent."""
        cell = self._cells[name]
        async with cell.changing, self._lock:
            await self._cells.suspend(cell)

    async def resume_cell(self, name: str) -> None:
        """Start a suspended engine again, give it the run's weights, let it serve. Idempotent.

        Publishes go on without it while it loads.
        """
        cell = self._cells[name]
        async with cell.changing:
            if not cell.state.suspend:
                return
            cell.loading = True
            cell.state.change(suspend=False, phase="Pending", healthy=("Unknown", "starting"), serving=("False", "starting"))
            try:
                await self._cells.restart(cell)
                async with self._lock:
                    cell.loading = False
                    await self._join(cell)
            except BaseException as error:
                await self._cells.suspend(cell)
                cell.state.change(serving=("False", f"did not start: {error}"[:500]))
                raise
            finally:
                cell.loading = False

    async def _join(self, cell: EngineCell) -> None:
        """A loaded and paused engine becomes one of those that live."""
        if self._republish is not None:
            await self._serve([cell], await self._republish(cell.engine))
        if self._offloaded:
            cell.judge.pause()
            await self._cells.each([cell], "offload")
        self._revived.set()

    async def inject_fault(self, name: str, kind: FaultKind) -> None:
        """Break an engine: end its process, or stop it so that it answers nothing.

        Raises:
            ValueError: a kind that this engine has no way for.
        """
        self._cells[name]
        if kind == "unhealthy":
            raise ValueError("an embedded engine cannot be told to call itself unhealthy; inject kill or hang")
        async with self._lock:
            await self._run.manager.signal(name, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)

    async def offload(self) -> None:
        """The engines leave the device to the trainer. Idempotent."""
        async with self._lock:
            if not self._offloaded:
                living = self._cells.living
                for cell in living:
                    cell.judge.pause()
                await self._cells.each(living, "offload")
                self._offloaded = True

    async def onload(self) -> None:
        """Back on the device. Idempotent."""
        if self._offloaded:
            async with self._lock:
                await self._onload()

    async def dispose(self) -> None:
        """End probes and engines. Idempotent."""
        await self._cells.dispose()

    async def _onload(self) -> None:
        if self._offloaded:
            living = self._cells.living
            await self._cells.each(living, "onload")
            for cell in living:
                cell.judge.resume()
            self._offloaded = False
