"""Decides how an evaluation runs beside training: on the training engines, or on snapshots elsewhere."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import deque
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Protocol

from miles.config.run_config import RunConfig
from miles.ray.run import current_or_none

logger = logging.getLogger(__name__)


class Exporter(Protocol):
    """The actor, as an evaluation sees it."""

    async def export_hf(self, rollout_id: int, path: str) -> None: ...


class Evaluator(Protocol):
    """The executor, as an evaluation sees it."""

    async def eval(self, rollout_id: int, hf_dir: str | None = None) -> Any: ...

    async def report_eval_skip(self, rollout_id: int, reason: str) -> None: ...


class EvalDispatcher:
    """An evaluation that fails costs its point, with a reason (busy, export_failed, ckpt_missing, crashed), never the run."""

    def __init__(self, args: RunConfig, actor_model: Exporter, rollout_executor: Evaluator) -> None:
        self.args, self._actor, self._executor = args, actor_model, rollout_executor
        self._in_flight: deque[tuple[int, asyncio.Task[None], Path | None]] = deque()
        self._exported: list[Path] = []

    async def dispatch(self, rollout_id: int, hf_dir: str | None = None, force: bool = False) -> None:
        """Evaluate the weights as they are after `rollout_id`.

        Shared engines: returns when it is done. Snapshots: returns when it is launched; at `eval_max_in_flight` it first
        waits for the oldest, or with --eval-when-busy skip gives this one up, unless `force`.

        Args:
            hf_dir: a checkpoint that is there already; never deleted. None: one is exported.
        """
        if self.args.eval_mode == "shared":
            await self._evaluate(rollout_id, None)
            return
        self._reap()
        while len(self._in_flight) >= self.args.eval_max_in_flight:
            if self.args.eval_when_busy == "skip" and not force:
                await self._skip(rollout_id, "busy")
                return
            await self._in_flight[0][1]
            self._reap()
        snapshot = await self._snapshot(rollout_id, hf_dir)
        if snapshot is not None:
            task = asyncio.get_running_loop().create_task(self._evaluate(rollout_id, str(snapshot)), name=f"evaluation of {rollout_id}")
            self._in_flight.append((rollout_id, task, None if hf_dir is not None else snapshot))

    async def drain(self) -> None:
        """Wait for every evaluation in flight; each is bounded by --eval-timeout."""
        while self._in_flight:
            await self._in_flight[0][1]
            self._reap()

    async def _snapshot(self, rollout_id: int, hf_dir: str | None) -> Path | None:
        if hf_dir is not None:
            path = Path(self._resolved(hf_dir))
            if hf_dir != self.args.hf_checkpoint and not await asyncio.to_thread(path.is_dir):
                await self._skip(rollout_id, "ckpt_missing", f"{hf_dir} is no directory")
                return None
            return path
        path = Path(self.args.eval_hf_dir or f"{self.args.run_dir}/eval_hf") / f"rollout_{rollout_id:06d}"
        try:
            await self._actor.export_hf(rollout_id, str(path.absolute()))
        except Exception as error:
            await self._skip(rollout_id, "export_failed", str(error))
            return None
        self._exported.append(path)
        self._prune()
        return path

    def _resolved(self, hf_dir: str) -> str:
        """The checkpoint of the settings as workers know it: a random model's name stands for a directory."""
        run = current_or_none()
        return run.worker_args().hf_checkpoint if run is not None and hf_dir == self.args.hf_checkpoint else hf_dir

    async def _evaluate(self, rollout_id: int, hf_dir: str | None) -> None:
        try:
            async with asyncio.timeout(self.args.eval_timeout):
                await self._executor.eval(rollout_id, hf_dir)
        except Exception as error:
            await self._skip(rollout_id, "crashed", f"{type(error).__name__}: {error}")

    async def _skip(self, rollout_id: int, reason: str, detail: str = "") -> None:
        logger.warning("no evaluation after rollout %d: %s%s", rollout_id, reason, f" ({detail})" if detail else "")
        await _never_raises(self._executor.report_eval_skip(rollout_id, reason))

    def _reap(self) -> None:
        while self._in_flight and self._in_flight[0][1].done():
            _, task, _ = self._in_flight.popleft()
            task.result()
        self._prune()

    def _prune(self) -> None:
        """Keep the newest exports, and those that are being evaluated."""
        used = {path for _, _, path in self._in_flight}
        for path in self._exported[: -self.args.eval_keep_snapshots]:
            if path not in used:
                shutil.rmtree(path, ignore_errors=True)
                self._exported.remove(path)


async def _never_raises(call: Coroutine[Any, Any, None]) -> None:
    try:
        await call
    except Exception as error:
        logger.debug("reporting a skipped evaluation: %s", error)
