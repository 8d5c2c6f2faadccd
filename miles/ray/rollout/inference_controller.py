"""Owns the engines' life: awake, paused, watched, suspended, started again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from miles.config.run_config import RunConfig
from miles.fault_tolerance.cells import Cell, CellState, FaultKind
from miles.fault_tolerance.health import HealthJudge, Verdict, watch
from miles.fault_tolerance.retry import retry
from miles.protocols import Engine
from miles.ray.run import Run
from miles.ray.worker_handle import WorkerDied, WorkerHandle
from miles.ray.worker_manager import all_or_first_error

logger = logging.getLogger(__name__)

_CONTROL_RETRIES = 2
_PASSING = (OSError, RuntimeError, TimeoutError)  # worth another try; WorkerDied is looked at before

Republish = Callable[[Engine], Awaitable[int]]
TellLive = Callable[[int, bool], Coroutine[None, None, None]]


@dataclass
class EngineCell:
    """One engine: its worker, what is shown of it, and who judges its health."""

    index: int
    handle: WorkerHandle
    state: CellState
    judge: HealthJudge
    dead: bool = False
    serves: bool = True  # what the executor was last told
    watching: asyncio.Task[None] | None = None
    weight_version: int = 0
    problem: str = field(default="")

    @property
    def name(self) -> str:
        return self.state.name

    @property
    def engine(self) -> Engine:
        return cast(Engine, self.handle)

    @property
    def lives(self) -> bool:
        return not self.state.suspend and not self.dead

    @property
    def works(self) -> bool:
        return self.lives and self.judge.verdict is not Verdict.UNHEALTHY


class InferenceController:
    """One per run, in the driver. A `CellOwner`: each engine is a cell of the control API.

    One lock serialises publishes, suspends, resumes and fault injection: a publish never meets an engine that comes or goes.
    """

    def __init__(self, args: RunConfig, run: Run, engines: Sequence[WorkerHandle]) -> None:
        self.args, self._run = args, run
        self._cells = {handle.worker_name: self._make_cell(index, handle) for index, handle in enumerate(engines)}
        self._lock = asyncio.Lock()
        self._revived = asyncio.Event()  # an engine was started again
        self._offloaded = False
        self._closing = False
        self._publishing: list[EngineCell] = []
        self._republish: Republish | None = None
        self._tell_live: TellLive | None = None
        self._telling: set[asyncio.Task[None]] = set()

    def _make_cell(self, index: int, handle: WorkerHandle) -> EngineCell:
        args = self.args
        judge = HealthJudge(failures=args.health_failures, stuck=args.engine_stuck_timeout, grace=args.engine_start_timeout)
        return EngineCell(index, handle, CellState(handle.worker_name, {"role": "engine"}), judge)

    async def init(self) -> None:
        """Bring up all engines, side by side. Past its limit, or on its first error, the run ends and names the log."""
        await self._run.guard.watch(self._run.manager.load_all([self._bring_up(cell) for cell in self._cells.values()]))

    async def _bring_up(self, cell: EngineCell) -> None:
        """Load the model, and leave the engine watched and without weights of the run."""
        cell.judge.start(asyncio.get_running_loop().time())
        cell.state.change(allocated=("True", ""), healthy=("Unknown", "starting"), serving=("False", "loading"))
        await cell.engine.init()
        cell.dead, cell.weight_version = False, 0
        cell.state.change(serving=("False", "waits for the first weights"), weight_version=0)
        cell.watching = asyncio.get_running_loop().create_task(
            watch(
                cell.judge,
                cell.engine.health,
                interval=self.args.health_interval,
                timeout=self.args.health_timeout,
                on_verdict=partial(self._judged, cell),
                fatal=(WorkerDied,),
                clock=asyncio.get_running_loop().time,
            ),
            name=f"health of {cell.name}",
        )

    @property
    def engines(self) -> list[Engine]:
        return [cell.engine for cell in self._cells.values()]

    def cells(self) -> list[Cell]:
        return [cell.state.view() for cell in self._cells.values()]

    def on_resume(self, republish: Republish) -> None:
        """`republish(engine)` publishes the current weights to one engine, and returns their version."""
        self._republish = republish

    def on_live(self, tell: TellLive) -> None:
        """`tell(index, live)` is awaited when an engine stops serving, or serves again."""
        self._tell_live = tell

    def _set_live(self, cell: EngineCell, live: bool) -> None:
        if cell.serves == live:
            return
        cell.serves = live
        if self._tell_live is not None:
            self._start(self._tell_live(cell.index, live))

    def _start(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._telling.add(task)
        task.add_done_callback(self._told)

    def _told(self, task: asyncio.Task[None]) -> None:
        self._telling.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.debug("telling of an engine: %s", task.exception())

    async def prepare_rollout(self, rollout_id: int) -> None:
        """Engines awake and watched. Called before each rollout is asked for."""
        await self._run.guard.halt_if_asked()
        await self.onload()

    async def prepare_eval(self) -> None:
        """As `prepare_rollout`, before an evaluation."""
        await self._run.guard.halt_if_asked()
        await self.onload()

    async def start_update_weights(self) -> list[Engine]:
        """Take the lock, leave the engines unwatched, pause those that live. Returns them.

        Where none lives, but the control API may start one again, that is waited for, within --engine-start-timeout.
        """
        while True:
            self._revived.clear()
            await self._lock.acquire()
            try:
                await self._onload()
                await self._pause([cell for cell in self._cells.values() if cell.lives])
                self._publishing = [cell for cell in self._cells.values() if cell.lives]
            except BaseException:
                self._lock.release()
                raise
            if self._publishing:
                return [cell.engine for cell in self._publishing]
            self._lock.release()
            await self._wait_for_one()

    async def _wait_for_one(self) -> None:
        problem = f"no engine is left to publish to:\n{self._problems()}"
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
                with contextlib.suppress(*_PASSING):
                    try:
                        await cell.engine.health()
                    except WorkerDied as error:
                        self._lose(cell, str(error))
            await self._resume_engines([cell for cell in self._publishing if cell.lives])
        finally:
            self._publishing = []
            self._lock.release()

    async def _pause(self, cells: Sequence[EngineCell]) -> None:
        for cell in cells:
            cell.judge.pause()
            cell.state.change(serving=("False", "paused for a publish"))
        await self._each(cells, "pause", self.args.pause_mode)

    async def _serve(self, cells: Sequence[EngineCell], weight_version: int) -> None:
        for cell in cells:
            assert weight_version >= cell.weight_version, "versions never go backwards"
            cell.weight_version = weight_version
        await self._resume_engines([cell for cell in cells if cell.lives])
        for cell in cells:
            if cell.lives:
                cell.state.change(phase="Running", serving=("True", ""), weight_version=weight_version)
                self._set_live(cell, True)

    async def _resume_engines(self, cells: Sequence[EngineCell]) -> None:
        await self._each(cells, "resume")
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
            cells = [cell for cell in self._cells.values() if cell.lives]
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
        cell = self._cell(name)
        async with self._lock:
            self._unwatch(cell)
            self._set_live(cell, False)
            await self._run.manager.end(name)
            cell.state.change(
                suspend=True,
                phase="Suspended",
                allocated=("False", "suspended"),
                healthy=("Unknown", "suspended"),
                serving=("False", "suspended"),
            )
            self._end_run_if_none_works()

    async def resume_cell(self, name: str) -> None:
        """Start a suspended engine again, give it the run's weights, let it serve. Idempotent."""
        cell = self._cell(name)
        if not cell.state.suspend:
            return
        cell.state.change(suspend=False, phase="Pending", healthy=("Unknown", "starting"), serving=("False", "starting"))
        async with self._lock:
            try:
                await self._run.manager.restart(name)
                await self._bring_up(cell)
                await self._pause([cell])
                if self._republish is not None:
                    await self._serve([cell], await self._republish(cell.engine))
                self._revived.set()
            except BaseException as error:
                cell.state.change(suspend=True, phase="Suspended", serving=("False", f"did not start: {error}"[:500]))
                raise

    async def inject_fault(self, name: str, kind: FaultKind) -> None:
        """Break an engine: end its process, or stop it so that it answers nothing.

        Raises:
            ValueError: a kind that this engine has no way for.
        """
        self._cell(name)
        if kind == "unhealthy":
            raise ValueError("an embedded engine cannot be told to call itself unhealthy; inject kill or hang")
        async with self._lock:
            await self._run.manager.signal(name, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)

    async def offload(self) -> None:
        """The engines leave the device to the trainer. Idempotent."""
        async with self._lock:
            if not self._offloaded:
                living = [cell for cell in self._cells.values() if cell.lives]
                for cell in living:
                    cell.judge.pause()
                await self._each(living, "offload")
                self._offloaded = True

    async def onload(self) -> None:
        """Back on the device. Idempotent."""
        if self._offloaded:
            async with self._lock:
                await self._onload()

    async def dispose(self) -> None:
        """End probes and engines. Idempotent."""
        self._closing = True
        for cell in self._cells.values():
            self._unwatch(cell)
        await asyncio.gather(*(self._run.manager.dispose_worker(cell.handle) for cell in self._cells.values() if cell.lives))

    def _cell(self, name: str) -> EngineCell:
        if name not in self._cells:
            raise KeyError(f"no cell {name!r}; there are {', '.join(self._cells)}")
        return self._cells[name]

    def _unwatch(self, cell: EngineCell) -> None:
        if cell.watching is not None:
            cell.watching.cancel()
            cell.watching = None

    async def _onload(self) -> None:
        if self._offloaded:
            living = [cell for cell in self._cells.values() if cell.lives]
            await self._each(living, "onload")
            for cell in living:
                cell.judge.resume()
            self._offloaded = False

    async def _each(self, cells: Sequence[EngineCell], method: str, *args: object) -> None:
        """One control call on several engines; a passing fault is tried again, a dead engine is noted and left out."""

        async def one(cell: EngineCell) -> None:
            async def call() -> None:
                try:
                    await getattr(cell.handle, method)(*args)
                except WorkerDied as error:
                    self._lose(cell, str(error))

            await retry(call, what=f"{method} of {cell.name}", retries=_CONTROL_RETRIES, retry_on=_PASSING)

        await all_or_first_error([one(cell) for cell in cells])

    def _judged(self, cell: EngineCell, verdict: Verdict, reason: str) -> None:
        """Called when the verdict on an engine, or its reason, changes."""
        cell.state.change(healthy=(verdict.value, reason))
        if verdict is Verdict.HEALTHY and cell.lives and not cell.serves and cell.weight_version > 0:
            logger.info("%s is well again", cell.name)
            cell.problem = ""
            cell.state.change(serving=("True", ""))
            self._set_live(cell, True)
        if verdict is Verdict.UNHEALTHY:
            self._lose(cell, reason, dead=reason.startswith(WorkerDied.__name__))

    def _lose(self, cell: EngineCell, reason: str, dead: bool = True) -> None:
        if cell.problem != reason:
            logger.error("%s is lost: %s", cell.name, reason)
        cell.problem = reason
        cell.dead = cell.dead or dead
        cell.state.change(healthy=("False", reason), serving=("False", "lost"))
        self._set_live(cell, False)
        self._end_run_if_none_works()

    def _end_run_if_none_works(self) -> None:
        """Nobody but the control API starts an engine again: without it, waiting for one would be for ever."""
        if not self.args.api_server_port and not self._closing and not any(cell.works for cell in self._cells.values()):
            self._closing = True
            self._start(self._end_run())

    async def _end_run(self) -> None:
        stacks = [await cell.handle.worker_stacks() for cell in self._cells.values() if cell.lives]
        self._run.guard.fail(RuntimeError("\n".join([f"no engine is left that works:\n{self._problems()}", *stacks])))

    def _problems(self) -> str:
        return "\n".join(f"{cell.name}: {cell.problem or 'suspended'}" for cell in self._cells.values())
