"""A synchronous run, told in order: generate, train, publish. With --colocate engines and trainers take turns on the same devices."""

import asyncio
import logging

from miles.config.run_config import RunConfig
from miles.ray.placement_group import create_rollout_components, create_training_models, maybe_start_api_server, update_weights
from miles.ray.rollout.eval_dispatch import EvalDispatcher
from miles.ray.wiring import shutdown_worker_manager
from miles.utils.arguments import parse_args
from miles.utils.ft_utils.mini_ft_controller import maybe_start_mini_ft_controller
from miles.utils.misc import should_run_periodic_action
from miles.utils.orchestration_utils import init_orchestration_script
from miles.utils.tracking_utils.tracking import finish_tracking
from train_async import save_if_due, train_on

logger = logging.getLogger("miles.train")


async def run(args: RunConfig) -> None:
    if args.fully_async:
        raise ValueError("--fully-async: this driver generates and trains in turn; train_async.py runs both at once")
    manager = init_orchestration_script(args)
    controller, executor, per_epoch = await create_rollout_components(args)
    actor, critic = await create_training_models(args, executor)
    models = [model for model in (actor, critic) if model is not None]
    maybe_start_api_server(args, {model.role: model for model in models}, controller)
    maybe_start_mini_ft_controller(args)

    async def trainers_leave() -> None:
        if args.colocate:
            await asyncio.gather(*(model.offload() for model in models))

    await update_weights(args, actor, executor, controller)
    if args.check_weight_update_equal:
        await controller.check_weights(
            "compare",
            args.check_weight_update_allow_quant_error,
            args.check_weight_update_selector,
            args.check_weight_update_skip_list,
        )
    await trainers_leave()
    evals = EvalDispatcher(args, actor, executor)
    first, total = args.start_rollout_id, args.num_rollout
    assert first is not None
    assert total is not None
    if args.eval_interval is not None and first == 0 and not args.skip_eval_before_train:
        await controller.prepare_eval()
        await evals.dispatch(0, hf_dir=args.hf_checkpoint)

    for rollout_id in range(first, total):
        await controller.prepare_rollout(rollout_id)
        data = await executor.get(rollout_id)
        if args.colocate:
            await controller.offload()
        await train_on(args, actor, critic, rollout_id, data)
        await save_if_due(args, models, executor, rollout_id, per_epoch)
        if (rollout_id + 1) % args.update_weights_interval == 0:
            await update_weights(args, actor, executor, controller, rollout_id=rollout_id)
        await trainers_leave()
        if should_run_periodic_action(rollout_id, args.eval_interval, per_epoch, total):
            await controller.prepare_eval()
            await evals.dispatch(rollout_id, force=rollout_id + 1 == total)
        if args.debug_exit_after_rollout is not None and rollout_id - first + 1 >= args.debug_exit_after_rollout:
            logger.info("--debug-exit-after-rollout %d: stopping after rollout %d", args.debug_exit_after_rollout, rollout_id)
            break

    await evals.drain()
    for part in (executor, controller, *models):
        await part.dispose()
    await shutdown_worker_manager(manager)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        asyncio.run(run(args))
    finally:
        finish_tracking()


if __name__ == "__main__":
    main()
