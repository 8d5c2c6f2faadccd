"""The engines as cells: brought up, watched, lost, suspended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from miles.config.run_config import RunConfig
from miles.fault_tolerance.cells import CellState, Load
from miles.fault_tolerance.health import HealthJudge, Verdict, watch
from miles.fault_tolerance.retry import retry
from miles.protocols import Engine, ProcessGone
from miles.ray.run import Run
from miles.ray.worker_handle import CallTimeout, WorkerHandle
from miles.ray.worker_manager import all_or_first_error
from miles.types import EngineHealth

logger = logging.getLogger(__name__)

CONTROL_RETRIES = 2
PASSING = (OSError, RuntimeError, TimeoutError)  # worth another try; WorkerDied is looked at before

TellLive = Callable[[int, bool], Coroutine[None, None, None]]


@dataclass
class EngineCell:
    """One engine: its worker, what is shown of it, and who judges its health."""

    index: int
    handle: WorkerHandle
    state: CellState
    judge: HealthJudge
    dead: bool = False  # its worker is gone, or what its worker needs
    serves: bool = True  # what the executor was last told
    watching: asyncio.Task[None] | None = None
    weight_version: int = 0
    problem: str = field(default="")
    loading: bool = False  # started again, and not yet handed the run's weights
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while it is suspended or resumed

    @property
    def name(self) -> str:
        return self.state.name

    @property
    def engine(self) -> Engine:
        return cast(Engine, self.handle)

    @property
    def lives(self) -> bool:
        return not self.state.suspend and not self.dead and not self.loading

    @property
    def works(self) -> bool:
        return self.lives and self.judge.verdict is not Verdict.UNHEALTHY


class EngineCells:
    """All engines of a run, by name. Who serialises what is done to them is the controller."""

    def __init__(self, args: RunConfig, run: Run, engines: Sequence[WorkerHandle]) -> None:
        self.args, self._run = args, run
        self._cells = {handle.worker_name: self._make_cell(index, handle) for index, handle in enumerate(engines)}
        self._closing = False
        self._tell_live: TellLive | None = None
        self._telling: set[asyncio.Task[None]] = set()

    def _make_cell(self, index: int, handle: WorkerHandle) -> EngineCell:
        args = self.args
        judge = HealthJudge(failures=args.health_failures, stuck=args.engine_stuck_timeout, grace=args.engine_start_timeout)
        return EngineCell(index, handle, CellState(handle.worker_name, {"role": "engine"}), judge)

    def __iter__(self) -> Iterator[EngineCell]:
        return iter(self._cells.values())

    def __getitem__(self, name: str) -> EngineCell:
        if name not in self._cells:
            raise KeyError(f"no cell {name!r}; there are {', '.join(self._cells)}")
        return self._cells[name]

    @property
    def living(self) -> list[EngineCell]:
        return [cell for cell in self if cell.lives]

    def problems(self) -> str:
        return "\n".join(f"{cell.name}: {cell.problem or 'suspended'}" for cell in self)

    async def init(self) -> None:
        """Bring up all, side by side. Past its limit, or on its first error, the run ends and names the log."""
        await self._run.guard.watch(all_or_first_error([self.bring_up(cell) for cell in self]))

    async def bring_up(self, cell: EngineCell) -> None:
        """Load the model, and leave the engine watched and without weights of the run."""
        cell.judge.start(asyncio.get_running_loop().time())
        cell.state.change(allocated=("True", ""), healthy=("Unknown", "starting"), serving=("False", "loading"))
        await cell.engine.init()
        cell.dead, cell.weight_version = False, 0
        cell.state.change(serving=("False", "waits for the first weights"), weight_version=0)
        cell.watching = asyncio.get_running_loop().create_task(
            watch(
                cell.judge,
                partial(self._probe, cell),
                interval=self.args.health_interval,
                timeout=self.args.health_timeout,
                on_verdict=partial(self._judged, cell),
                fatal=(ProcessGone,),
                clock=asyncio.get_running_loop().time,
            ),
            name=f"health of {cell.name}",
        )

    async def _probe(self, cell: EngineCell) -> EngineHealth:
        health = await cell.engine.health()
        cell.state.load = Load(running=health.running, waiting=health.waiting, tokens=health.tokens, tokens_cut=health.tokens_cut)
        return health

    async def restart(self, cell: EngineCell) -> None:
        """Start the engine anew, and pause it at once: it must never serve the checkpoint that it loaded."""
        await self._run.manager.restart(cell.name)
        await self.bring_up(cell)
        cell.judge.pause()
        await cell.engine.pause(self.args.pause_mode)

    async def suspend(self, cell: EngineCell) -> None:
        """End the engine's worker."""
        self._unwatch(cell)
        self.set_live(cell, False)
        await self._run.manager.end(cell.name)
        cell.state.change(
            suspend=True,
            phase="Suspended",
            allocated=("False", "suspended"),
            healthy=("Unknown", "suspended"),
            serving=("False", "suspended"),
        )
        self._end_run_if_none_works()

    async def dispose(self) -> None:
        """End probes and engines. Idempotent."""
        self._closing = True
        for cell in self:
            self._unwatch(cell)
        await asyncio.gather(*(self._run.manager.dispose_worker(cell.handle) for cell in self.living))

    async def each(self, cells: Sequence[EngineCell], method: str, *args: object) -> None:
        """One control call on several engines; a passing fault is tried again, a dead or silent engine is lost and left out."""

        async def one(cell: EngineCell) -> None:
            async def call() -> None:
                try:
                    await getattr(cell.handle, method)(*args)
                except ProcessGone as error:
                    self.lose(cell, str(error))
                except CallTimeout as error:
                    logger.error("%s", error)
                    await self._give_up(cell, str(error).partition("\n")[0])

            await retry(call, what=f"{method} of {cell.name}", retries=CONTROL_RETRIES, retry_on=PASSING)

        await all_or_first_error([one(cell) for cell in cells])

    def on_live(self, tell: TellLive) -> None:
        """`tell(index, live)` is awaited when an engine stops serving, or serves again."""
        self._tell_live = tell

    def set_live(self, cell: EngineCell, live: bool) -> None:
        if cell.serves == live:
            return
        cell.serves = live
        if self._tell_live is not None:
            self._start(self._tell_live(cell.index, live))

    def lose(self, cell: EngineCell, reason: str, dead: bool = True) -> None:
        if cell.problem != reason:
            logger.error("%s is lost: %s", cell.name, reason)
        cell.problem = reason
        cell.dead = cell.dead or dead
        cell.state.change(healthy=("False", reason), serving=("False", "lost"))
        cell.state.load = None
        self.set_live(cell, False)
        self._end_run_if_none_works()

    async def _give_up(self, cell: EngineCell, reason: str) -> None:
        """Lose an engine that does not answer, and end its worker: it must not come back with old weights, or half of new ones."""
        self._unwatch(cell)
        self.lose(cell, reason)
        await self._run.manager.end(cell.name)

    def _judged(self, cell: EngineCell, verdict: Verdict, reason: str) -> None:
        """Called when the verdict on an engine, or its reason, changes."""
        cell.state.change(healthy=(verdict.value, reason))
        if verdict is Verdict.HEALTHY and cell.lives and not cell.serves and cell.weight_version > 0:
            logger.info("%s is well again", cell.name)
            cell.problem = ""
            cell.state.change(serving=("True", ""))
            self.set_live(cell, True)
        if verdict is Verdict.UNHEALTHY:
            self.lose(cell, reason, dead=cell.judge.gone)

    def _unwatch(self, cell: EngineCell) -> None:
        if cell.watching is not None:
            cell.watching.cancel()
            cell.watching = None
        cell.state.load = None

    def _end_run_if_none_works(self) -> None:
        """Nobody but the control API starts an engine again: without it, waiting for one would be for ever."""
        if not self.args.api_server_port and not self._closing and not any(cell.works for cell in self):
            self._closing = True
            self._start(self._end_run())

    async def _end_run(self) -> None:
        stacks = [await cell.handle.worker_stacks() for cell in self.living]
        self._run.guard.fail(RuntimeError("\n".join([f"no engine is left that works:\n{self.problems()}", *stacks])))

    def _start(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._telling.add(task)
        task.add_done_callback(self._told)

    def _told(self, task: asyncio.Task[None]) -> None:
        self._telling.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.debug("telling of an engine: %s", task.exception())
