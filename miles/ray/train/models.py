"""Brings up the trainers, and finds out where the run goes on."""

from __future__ import annotations

import asyncio
import logging

from miles.config.run_config import RunConfig
from miles.config.validate import lacks_last_eval
from miles.ray import run as runs
from miles.ray.guard import EndOfRun
from miles.ray.rollout.remote_executor import RemoteExecutor
from miles.ray.run import Run
from miles.ray.train.train_group import TrainGroup
from miles.ray.wiring import trainer_specs
from miles.ray.worker_manager import all_or_first_error
from miles.types import Role

logger = logging.getLogger(__name__)


async def create_training_models(args: RunConfig, rollout_executor: RemoteExecutor) -> tuple[TrainGroup, TrainGroup | None]:
    """Start and load actor and critic, and fill in `start_rollout_id`.

    Raises:
        ValueError: ranks or roles restored different rollouts.
        EndOfRun: the checkpoint is already where the run is to end, and so are its evaluations.
    """
    run = runs.current()
    roles: list[Role] = ["actor", "critic"] if args.use_critic else ["actor"]
    groups = await run.guard.watch(all_or_first_error([_start(run, role) for role in roles]))
    restored = await run.guard.watch(all_or_first_error([group.init() for group in groups]))
    last = _agreed({f"{role}-{rank}": id for role, ids in zip(roles, restored, strict=True) for rank, id in enumerate(ids)})
    if args.start_rollout_id is None:
        args.fill(start_rollout_id=0 if last is None else last + 1)
    start, total = args.start_rollout_id or 0, args.num_rollout or 0
    if start >= total and not (args.goes_on and lacks_last_eval(args, total - 1)):  # the first publish makes up for it
        raise EndOfRun(f"the checkpoint is at {start} of {total} rollouts: nothing to do (ask for more with --num-rollout)", 0)
    if last is not None:
        run.checkpoints.going_on(last)
        await rollout_executor.load(start - 1)
        logger.info("resuming: rollout %d is next, %d of %d are done", start, start, total)
    if run.starting is not None:
        run.starting.up()
    actor, critic = groups[0], groups[1] if args.use_critic else None

    async def trained(rollout_id: int, step: int) -> None:
        await rollout_executor.note_trained(rollout_id, step)

    one_save = asyncio.Lock()

    async def save_all(rollout_id: int) -> None:
        async with one_save:  # the end of a training and the signal that came in it may both ask
            if run.checkpoints.last_complete == rollout_id:
                return
            for group in groups:
                if args.use_critic and args.offload_train:
                    await group.onload()
                await group.save_model(rollout_id, force_sync=True)
            await rollout_executor.save_now(rollout_id, args.save_grace)

    run.checkpoints.parts = (*roles, "executor")
    run.save_all = save_all
    for group in groups:
        group.on_trained(trained)
    return actor, critic


async def _start(run: Run, role: Role) -> TrainGroup:
    ranks = await run.manager.start_all(trainer_specs(run.worker_args(), role, run.manager.store))
    group = TrainGroup(run.args, run, role, ranks)
    run.manager.on_shutdown(group.dispose)
    return group


def _agreed(restored: dict[str, int | None]) -> int | None:
    """The rollout that all of them restored."""
    if len(set(restored.values())) > 1:
        table = ", ".join(f"{name}: {'none' if id is None else id}" for name, id in restored.items())
        raise ValueError(f"--load: the trainers restored different rollouts ({table}); take a checkpoint that is complete for all of them")
    return next(iter(restored.values()))
