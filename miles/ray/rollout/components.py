"""Brings up the rollout side: engines, their controller, and the executor."""

from __future__ import annotations

from miles.config.run_config import RunConfig
from miles.ray import run as runs
from miles.ray.rollout.inference_controller import InferenceController
from miles.ray.rollout.remote_executor import RemoteExecutor
from miles.ray.wiring import all_specs, engine_specs, executor_spec
from miles.ray.worker_manager import all_or_first_error


async def create_rollout_components(args: RunConfig) -> tuple[InferenceController, RemoteExecutor, int | None]:
    """Start engines and executor, and find out how many rollouts there are.

    Returns:
        controller, executor, and rollouts per epoch: None when `num_rollout` was given.
    """
    run = runs.current()
    manager, worker_args = run.manager, run.worker_args()
    everything = all_specs(run)
    await run.guard.watch(manager.reserve(everything))
    manager.prepare([spec for spec in everything if spec.kind != "engine"])
    specs = [executor_spec(worker_args, manager.store), *engine_specs(worker_args)]
    handle, *engines = await run.guard.watch(manager.start_all(specs))
    executor = RemoteExecutor(args, run, handle)
    manager.on_shutdown(executor.dispose)
    controller = InferenceController(args, run, engines)
    manager.on_shutdown(controller.dispose)
    controller.on_live(executor.set_engine_live)

    async def bring_up_executor() -> int:
        await executor.init(controller.engines)
        return await executor.num_rollout_per_epoch()

    _, per_epoch = await run.guard.watch(all_or_first_error([controller.init(), bring_up_executor()]))
    if args.num_rollout is not None:
        return controller, executor, None
    if args.num_epoch is None:
        raise ValueError("--num-rollout or --num-epoch: one of them says how long the run is")
    args.fill(num_rollout=per_epoch * args.num_epoch)
    run.per_epoch = per_epoch
    return controller, executor, per_epoch
