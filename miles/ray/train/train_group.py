"""All ranks of one role as one object."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from miles.config.run_config import RunConfig
from miles.config.schema import flag
from miles.fault_tolerance.cells import Cell, CellState, Status
from miles.fault_tolerance.kill_points import reached
from miles.protocols import Engine, FirstStepWrong
from miles.ray import weight_update
from miles.ray.guard import Interrupted
from miles.ray.run import Run
from miles.ray.worker_handle import WorkerHandle
from miles.ray.worker_manager import all_or_first_error
from miles.tracking import tracking
from miles.types import ObjectRef, Role, RolloutDataRef, TrainOutputRef, TrainResult
from miles.weights.compare import compare_checksums

logger = logging.getLogger(__name__)


class TrainGroup:
    """Lives in the driver. Every call goes to all ranks at once and returns when all have done it."""

    def __init__(self, args: RunConfig, run: Run, role: Role, ranks: Sequence[WorkerHandle]) -> None:
        self.args, self.role, self.ranks = args, role, list(ranks)
        self._run = run
        self._state = CellState(role, {"role": "trainer"})
        self._saved_rollout: int | None = None  # what the last save was of
        self._one_save = asyncio.Lock()
        self._saving: asyncio.Task[None] | None = None  # becomes done when the last save is on disk
        self._offloaded = False
        self._unverified: Sequence[Engine] = []  # with --verify-first-step, until the first training: engines with our weights
        self._hosts: dict[str, str] = {}
        self._rejection_told = False
        self._first_step: dict[str, float] = {}  # what --verify-first-step has measured so far
        self._on_trained: Callable[[int, int], Awaitable[None]] | None = None

    def on_trained(self, callback: Callable[[int, int], Awaitable[None]]) -> None:
        """`callback(rollout_id, step)` is awaited when a rollout's training is done, for all roles."""
        self._on_trained = callback

    async def init(self) -> list[int | None]:
        """Load the model, or restore it. Returns each rank's restored rollout id."""
        address, port = await self.ranks[0].worker_port()
        restored: list[int | None] = await self._all("init", address, port)
        ready: tuple[Status, str] = ("True", "")
        self._state.change(phase="Running", allocated=ready, healthy=ready, serving=ready)
        return restored

    async def train(self, rollout_id: int, data_ref: RolloutDataRef, external_data: TrainOutputRef | None = None) -> TrainOutputRef | None:
        """Make one rollout's optimizer steps. The critic returns its values; the actor takes them as `external_data`."""
        if self._run.open_rollout is None:
            await self._run.guard.halt_if_asked()
            # Logged here and not when it arrives: so the order of the lines does not depend on what was faster.
            tracking.log(data_ref.metrics, rollout_id)
        await self.onload()
        values: Sequence[ObjectRef | None] = external_data.shares if external_data is not None else [None] * len(self.ranks)
        assert len(data_ref.shares) == len(values) == len(self.ranks), "one share for each rank"
        if self._unverified:
            await self._compare_weights(self._unverified)
            self._unverified = []
        calls = [rank.train(rollout_id, share, value) for rank, share, value in zip(self.ranks, data_ref.shares, values, strict=True)]
        self._run.open_rollout = rollout_id
        async with self._run.trainers_idle:
            with tracking.timeline().span(self.role, "train", rollout_id=rollout_id):
                results = cast(list[TrainResult], await self._run.guard.watch(all_or_first_error(calls)))
            self._warn_if_all_rejected(results[0].metrics_per_step)
            self._tell_first_step(data_ref.metrics, results[0].metrics_per_step)
            for place, metrics in enumerate(results[0].metrics_per_step):
                tracking.log(metrics, rollout_id, results[0].step - len(results[0].metrics_per_step) + place + 1)
            if self._closes(rollout_id):
                await self._rollout_trained(rollout_id, results[0].step)
        if self.role == "actor":
            return None
        shares = [cast(ObjectRef, result.values) for result in results]
        self._run.manager.store.adopt(shares)
        return TrainOutputRef(rollout_id, shares)

    def _tell_first_step(self, rollout: Mapping[str, float], steps: Sequence[Mapping[str, float]]) -> None:
        """Once, when all of --verify-first-step has passed."""
        found = {name: value for name, value in {**rollout, **(steps[0] if steps else {})}.items() if name.startswith("verify/")}
        self._first_step |= found
        if "verify/logprob_abs_diff" in found:
            logger.info("%s", first_step_passed(self._first_step, steps[0].get("train/ratio_deviation_max")))

    def _warn_if_all_rejected(self, steps: Sequence[Mapping[str, float]]) -> None:
        """Once: such a step moves the weights by nothing but its KL and entropy terms."""
        if not self._rejection_told and any(metrics.get("train/rejected") == 1 for metrics in steps):
            self._rejection_told = True
            masks = [name for name in ("mask_level", "mask_outlier") if self.args.__dict__[name] is not None]
            logger.warning(
                "an optimizer step learnt nothing from its samples: %s rejected all of their tokens; train/rollout_kl says how far the "
                "trainer is from what the engines sample",
                " and ".join(map(flag, masks)),
            )

    def _closes(self, rollout_id: int) -> bool:
        """Whether this is the last training of that rollout."""
        return self.role == "actor" or rollout_id < self.args.num_critic_only_steps

    async def _rollout_trained(self, rollout_id: int, step: int) -> None:
        run = self._run
        run.trained_through, run.open_rollout = rollout_id, None
        reached(self.args, "before_trained", rollout_id)
        if self._on_trained is not None:
            await self._on_trained(rollout_id, step)
        reached(self.args, "after_trained", rollout_id)
        if (rollout_id + 1) % self.args.update_weights_interval:
            tracking.step_done(rollout_id)
        if run.guard.signum is None:
            return
        saved = ""
        if self.args.save_on_signal and run.save_all is not None:
            await run.save_all(rollout_id)
            saved = f"; rollout {rollout_id} is saved in {run.checkpoints.folder(rollout_id)}"
        error = Interrupted(run.guard.signum, saved)
        run.guard.fail(error)
        raise error

    async def update_weights(
        self, engines: Sequence[Engine], rollout_id: int | None = None, pause: weight_update.Pause | None = None
    ) -> int:
        """Publish the current weights to `engines`, proved by checksums. Returns their version. `pause`: see `weight_update.move`."""
        version = weight_update.version_after(self.args, rollout_id)
        with tracking.timeline().span("actor", "publish", **({} if rollout_id is None else {"rollout_id": rollout_id})) as span:
            async with self._awake():
                one_host = await self._one_host(engines)
                end = self._end_engine
                await weight_update.move(self.args, self.ranks, engines, version, end_engine=end, pause=pause, one_host=one_host)
        tracking.timeline().published(span, [cast(WorkerHandle, engine).worker_name for engine in engines])
        if rollout_id is not None:
            tracking.step_done(rollout_id)
        elif self.args.verify_first_step:
            self._unverified = list(engines)
        return version

    async def _compare_weights(self, engines: Sequence[Engine]) -> None:
        """Raises FirstStepWrong where an engine computes with other weights than the trainer at this moment."""
        ours = (await self._all("weights_checksum"))[0]
        for place, engine in enumerate(engines):
            theirs = await self._run.guard.watch(engine.check_weights("checksum"))
            comparison = compare_checksums(ours, theirs)
            if not comparison.equal:
                raise FirstStepWrong("weights", f"engine {place} of {len(engines)} has not the trainer's weights: {comparison}")
        logger.info("first step: %d weights are equal in the trainer and %d engines", len(ours), len(engines))

    async def _end_engine(self, engine: Engine) -> None:
        await self._run.manager.end(cast(WorkerHandle, engine).worker_name)

    async def _one_host(self, engines: Sequence[Engine]) -> bool:
        """Whether these engines and all ranks are on one host."""
        workers = [*self.ranks, *cast(Sequence[WorkerHandle], engines)]
        for worker in workers:
            if worker.worker_name not in self._hosts:
                self._hosts[worker.worker_name] = (await worker.worker_port())[0]
        return len({self._hosts[worker.worker_name] for worker in workers}) == 1

    async def save_model(self, rollout_id: int, force_sync: bool) -> None:
        """Save this role's part; unless forced, training goes on while it is written. Waits for the save before it."""
        reached(self.args, "before_save", rollout_id)
        async with self._one_save:  # a signal may ask for the save that is being begun
            with tracking.timeline().span(self.role, "save"), self._run.checkpoints.writing(rollout_id):
                await self._run.guard.watch(self._settle_save())
                if self._saved_rollout == rollout_id:  # nothing has been trained since
                    return
                folder, self._saved_rollout = self._run.checkpoints.begin(rollout_id), rollout_id
                await self._all("save", rollout_id, folder, force_sync)
                self._saving = asyncio.get_running_loop().create_task(self._written(rollout_id), name=f"save of the {self.role}")
                self._saving.add_done_callback(self._saved)
                reached(self.args, f"{self.role}_saved", rollout_id)
                if force_sync:
                    await self._run.guard.watch(self._settle_save())

    async def _written(self, rollout_id: int) -> None:
        """Waits until all ranks have written their files; the last part of a checkpoint makes it count."""
        files: dict[str, Any] = {}
        with self._run.checkpoints.writing(rollout_id):
            for own in await all_or_first_error([rank.wait_for_save() for rank in self.ranks]):
                files |= own
            self._run.checkpoints.written(rollout_id, self.role, files)

    def _saved(self, task: asyncio.Task[None]) -> None:
        """Nobody may be waiting for a save that fails: it ends the run all the same."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._run.guard.fail(error)

    async def _settle_save(self) -> None:
        """Wait until the last save is on disk. Also at the end of a run that failed."""
        saving, self._saving = self._saving, None
        if saving is not None:
            await saving

    async def export_hf(self, rollout_id: int, path: str) -> None:
        """Write a Hugging Face checkpoint of the current weights."""
        logger.info("exporting the weights after rollout %d to %s", rollout_id, path)
        async with self._awake():
            await self._all("export_hf", path)

    async def onload(self) -> None:
        """Back on the device. Idempotent."""
        if self._offloaded:
            await self._all("onload")
            self._offloaded = False

    async def offload(self) -> None:
        """Weights and optimizer leave the device; whatever needs them there brings them back. Idempotent."""
        if not self._offloaded:
            await self._all("offload")
            self._offloaded = True

    @asynccontextmanager
    async def _awake(self) -> AsyncIterator[None]:
        """On the device for a while."""
        was_offloaded = self._offloaded
        await self.onload()
        yield
        if was_offloaded:
            await self.offload()

    def cells(self) -> list[Cell]:
        """This role as one cell of the control API, to look at."""
        return [self._state.view()]

    async def dispose(self) -> None:
        """Finish what is being saved, and end the ranks. Idempotent."""
        try:
            await self._settle_save()
        finally:
            await asyncio.gather(*(self._run.manager.dispose_worker(rank) for rank in self.ranks))

    async def _all(self, method: str, *args: Any) -> list[Any]:
        calls = [getattr(rank, method)(*args) for rank in self.ranks]
        return await self._run.guard.watch(all_or_first_error(calls))


def first_step_passed(found: Mapping[str, float], ratio_deviation: float | None) -> str:
    """The closing line of --verify-first-step, from its metrics. `ratio_deviation`: None without a policy ratio, as in sft."""
    reference, gold = found.get("verify/reference_abs_diff_max"), found.get("verify/gold_answers")
    parts = [
        f"{found['verify/tokens_as_written']:.0f} trained tokens are as engines wrote them" if "verify/tokens_as_written" in found else "",
        f"log-probs of trainer and engines differ by {found['verify/logprob_abs_diff']:.2g} on average, "
        f"{found['verify/logprob_abs_diff_max']:.2g} at most",
        "there is no policy ratio"
        if ratio_deviation is None
        else "the policy ratio is 1" + (f" to {ratio_deviation:.2g}" if ratio_deviation else ""),
        "there is no KL to a reference"
        if reference is None
        else f"the KL to the reference is 0 (log-probs differ by {reference:.2g} at most)",
        "gold answers are not tried (no labels, or a reward that is no built-in rule)"
        if gold is None
        else f"{gold:.0f} gold answers score 1",
    ]
    return f"first step: all passed: {'; '.join(filter(None, parts))}"
