"""The rollout executor as the driver sees it: forwards, logs evaluations, keeps the timeline."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from miles.config.run_config import RunConfig
from miles.fault_tolerance.kill_points import reached
from miles.protocols import Engine
from miles.ray.run import Run
from miles.ray.worker_handle import CallTimeout, WorkerHandle
from miles.tracking import tracking
from miles.tracking.critical_path import Arrival
from miles.types import EvalResult, RolloutDataRef

logger = logging.getLogger(__name__)


class RemoteExecutor:
    """One per run; the executor itself is a worker."""

    def __init__(self, args: RunConfig, run: Run, handle: WorkerHandle) -> None:
        self.args, self._run, self._handle = args, run, handle
        self._asked = -1  # the last rollout that was asked for
        self._saving: asyncio.Task[None] | None = None
        self._saving_id = -1

    async def init(self, engines: list[Engine]) -> None:
        await self._run.guard.watch(self._handle.init(engines))

    async def num_rollout_per_epoch(self) -> int:
        """floor(rows / rollout_batch_size). Raises ValueError when that is 0."""
        return int(await self._run.guard.watch(self._handle.num_rollout_per_epoch()))

    async def get(self, rollout_id: int) -> RolloutDataRef:
        """One rollout, scored and cut into shares; an empty one beyond the last, which a run asks for that goes on at its end."""
        if self.args.num_rollout is not None and rollout_id >= self.args.num_rollout:
            return RolloutDataRef(rollout_id, shares=[], num_samples=0, metrics={}, group_indices=[])
        self._asked = max(self._asked, rollout_id)
        await self._run.guard.halt_if_asked()
        with tracking.timeline().span("executor", "generate", rollout_id=rollout_id):
            try:
                ref: RolloutDataRef = await self._run.guard.watch(self._handle.get(rollout_id))
            except CallTimeout as error:
                error.add_note(f"In flight: {await self._handle.stats()}")
                raise
        tracking.timeline().arrived(rollout_id, Arrival(ref.times, ref.ready))
        self._run.manager.store.adopt(ref.shares)
        return ref

    async def eval(self, rollout_id: int, hf_dir: str | None = None) -> EvalResult:
        """One evaluation; its metrics are logged at the rollout that it belongs to, however late it ends."""
        reached(self.args, "before_eval", rollout_id)
        step = 0 if self._run.trained_through is None and rollout_id == 0 else None
        with tracking.timeline().span("executor", "eval", rollout_id=rollout_id, background=hf_dir is not None):
            result: EvalResult = await self._run.guard.watch(self._handle.eval(rollout_id, hf_dir))
        if result.reason:
            logger.warning("evaluation after rollout %d: %s", rollout_id, result.reason)
        tracking.log(result.metrics, rollout_id, step)
        self._run.checkpoints.score(rollout_id, result.metrics)
        return result

    async def report_eval_skip(self, rollout_id: int, reason: str) -> None:
        await self._handle.report_eval_skip(rollout_id, reason)

    async def quiet(self) -> None:
        """Wait for answers that must not mix two weight versions."""
        await self._run.guard.watch(self._handle.quiet())

    async def set_weight_version(self, version: int) -> None:
        await self._run.guard.watch(self._handle.set_weight_version(version))

    async def set_engine_live(self, index: int, live: bool) -> None:
        await self._handle.set_engine_live(index, live)

    async def note_trained(self, rollout_id: int, step: int) -> None:
        await self._run.guard.watch(self._handle.note_trained(rollout_id, step))

    async def save(self, rollout_id: int) -> None:
        """Save the data's state as of the last trained rollout, and what was generated since.

        Returns at once when the next rollout is being generated: this part of the checkpoint is written when that is done, so that
        a resumed run trains on the same batch. Asked for by the sentinel, it returns when all is on disk.
        """
        await self.settle_save()
        folder = self._run.checkpoints.begin(rollout_id)
        ahead = self._asked if self._asked > rollout_id else None
        self._saving = asyncio.get_running_loop().create_task(self._save(rollout_id, folder, ahead), name=f"save of rollout {rollout_id}")
        self._saving.add_done_callback(self._saved)
        self._saving_id = rollout_id
        asked = self._is_asked_from_outside()
        if ahead is None or asked:
            await self.settle_save()
        if asked and self._run.checkpoints.last_complete == rollout_id:
            self._answer(rollout_id)

    async def save_now(self, rollout_id: int, grace: float) -> None:
        """As `save`, done when this returns: after `grace` seconds without what is being generated, which is started again then."""
        folder = self._run.checkpoints.begin(rollout_id)
        if self._saving_id != rollout_id:
            await self.save(rollout_id)
        if self._saving is not None and not (await asyncio.wait({self._saving}, timeout=grace))[0]:
            logger.warning("rollout %d is saved without the next one, which is not done within %g s", rollout_id, grace)
            self._saving.cancel()
            await asyncio.gather(self._saving, return_exceptions=True)
            self._saving = None
            await self._save(rollout_id, folder, None, wait=False)
        await self.settle_save()

    async def settle_save(self) -> None:
        """Wait for this side's part of the last checkpoint."""
        if self._saving is not None and not self._saving.done():  # it stays, as somebody else may come to wait for it too
            await self._run.guard.watch(self._saving)

    def _saved(self, task: asyncio.Task[None]) -> None:
        """Nobody may be waiting for a save that fails."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._run.guard.fail(error)

    async def _save(self, rollout_id: int, folder: str, ahead: int | None, wait: bool = True) -> None:
        with self._run.checkpoints.writing(rollout_id):
            await self._handle.save(rollout_id, folder, ahead, wait)
            self._run.checkpoints.written(rollout_id, "executor")

    def _answer(self, rollout_id: int) -> None:
        """Say which rollout was saved: in FILE.saved, and in the log. The driver takes the request away.

        A request that comes while another save is under way, which need not be whole yet, is left to the next.
        """
        Path(f"{self.args.save_trigger_sentinel}.saved").write_text(f"{rollout_id}\n", encoding="utf-8")
        logger.info("saved rollout %d, as %s asked", rollout_id, self.args.save_trigger_sentinel)

    def _is_asked_from_outside(self) -> bool:
        sentinel = self.args.save_trigger_sentinel
        return sentinel is not None and (Path(sentinel).exists() or Path(f"{sentinel}.saving").exists())

    async def load(self, rollout_id: int) -> None:
        """Go on after `rollout_id`, from the checkpoint that --load names."""
        directory = self._run.worker_args().load
        assert directory is not None, "only a resumed run loads"
        await self._run.guard.watch(self._handle.load(rollout_id, directory))

    async def dispose(self) -> None:
        """Finish what is being saved, unless the run failed, and end the worker. Idempotent."""
        if self._run.guard.failed and self._saving is not None:
            self._saving.cancel()
            await asyncio.gather(self._saving, return_exceptions=True)
            self._saving = None
        await self.settle_save()
        await self._run.manager.dispose_worker(self._handle)
