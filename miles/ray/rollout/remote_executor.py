"""The rollout executor as the driver sees it: forwards, logs evaluations, keeps the timeline."""

from __future__ import annotations

import logging

from miles.config.run_config import RunConfig
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

    async def init(self, engines: list[Engine]) -> None:
        await self._run.guard.watch(self._handle.init(engines))

    async def num_rollout_per_epoch(self) -> int:
        """floor(rows / rollout_batch_size). Raises ValueError when that is 0."""
        return int(await self._run.guard.watch(self._handle.num_rollout_per_epoch()))

    async def get(self, rollout_id: int) -> RolloutDataRef:
        """One rollout, scored and cut into shares."""
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
        step = 0 if self._run.trained_through is None and rollout_id == 0 else None
        with tracking.timeline().span("executor", "eval", rollout_id=rollout_id, background=hf_dir is not None):
            result: EvalResult = await self._run.guard.watch(self._handle.eval(rollout_id, hf_dir))
        if result.reason:
            logger.warning("evaluation after rollout %d: %s", rollout_id, result.reason)
        tracking.log(result.metrics, rollout_id, step)
        return result

    async def report_eval_skip(self, rollout_id: int, reason: str) -> None:
        await self._handle.report_eval_skip(rollout_id, reason)

    async def set_weight_version(self, version: int) -> None:
        await self._run.guard.watch(self._handle.set_weight_version(version))

    async def set_engine_live(self, index: int, live: bool) -> None:
        await self._handle.set_engine_live(index, live)

    async def note_trained(self, rollout_id: int, step: int) -> None:
        await self._run.guard.watch(self._handle.note_trained(rollout_id, step))

    async def save(self, rollout_id: int) -> None:
        """Save the data's state as of the last trained rollout."""
        await self._run.guard.watch(self._handle.save(rollout_id, self._run.checkpoints.begin(rollout_id)))
        self._run.checkpoints.written(rollout_id, "executor")

    async def load(self, rollout_id: int) -> None:
        """Go on after `rollout_id`, from the checkpoint that --load names."""
        directory = self._run.worker_args().load
        assert directory is not None, "only a resumed run loads"
        await self._run.guard.watch(self._handle.load(rollout_id, directory))

    async def dispose(self) -> None:
        await self._run.manager.dispose_worker(self._handle)
