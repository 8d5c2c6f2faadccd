"""An asynchronous run, told in order: while the actor trains on one rollout, the engines write the next."""

import asyncio
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

from miles.config.run_config import RunConfig
from miles.ray.placement_group import create_rollout_components, create_training_models, maybe_start_api_server, update_weights
from miles.ray.rollout.eval_dispatch import EvalDispatcher
from miles.ray.wiring import shutdown_worker_manager
from miles.utils.arguments import parse_args, validate_async_off_policy_correction
from miles.utils.async_utils import eager_create_task
from miles.utils.data import remove_rollout_data_refs, remove_train_output_refs
from miles.utils.ft_utils.mini_ft_controller import maybe_start_mini_ft_controller
from miles.utils.misc import should_run_periodic_action
from miles.utils.orchestration_utils import init_orchestration_script
from miles.utils.tracking_utils.tracking import finish_tracking

logger = logging.getLogger("miles.train_async")


async def run(args: RunConfig) -> None:
    if args.colocate:
        raise ValueError("--colocate: an asynchronous run needs engines and trainers side by side; train.py takes turns")
    validate_async_off_policy_correction(args)
    manager = init_orchestration_script(args)
    controller, executor, per_epoch = await create_rollout_components(args)
    actor, critic = await create_training_models(args, executor)
    maybe_start_api_server(args, {"actor": actor} | ({"critic": critic} if critic else {}), controller)
    maybe_start_mini_ft_controller(args)

    # The engines answer with the trainer's weights from the first request on, resumed or not.
    await update_weights(args, actor, executor, controller)
    if args.check_weight_update_equal:
        await controller.check_weights(
            "compare",
            args.check_weight_update_allow_quant_error,
            args.check_weight_update_selector,
            args.check_weight_update_skip_list,
        )
    evals = EvalDispatcher(args, actor, executor)
    first, total = args.start_rollout_id, args.num_rollout
    assert first is not None
    assert total is not None
    if args.eval_interval is not None and first == 0 and not args.skip_eval_before_train:
        await controller.prepare_eval()
        await evals.dispatch(0, hf_dir=args.hf_checkpoint)

    async def generate(rollout_id: int) -> Any:
        await controller.prepare_rollout(rollout_id)
        return await executor.get(rollout_id)

    pending = await eager_create_task(generate(first))
    for rollout_id in range(first, total):
        data = await pending
        more = rollout_id + 1 < total
        publish_due = (rollout_id + 1) % args.update_weights_interval == 0
        # A fully asynchronous producer needs no pending request to go on. What it has is drained after the publish, at its new age.
        ask_later = args.fully_async and publish_due
        if more and not ask_later:
            pending = await eager_create_task(generate(rollout_id + 1))

        await train_on(args, actor, critic, rollout_id, data)
        await save_if_due(args, [model for model in (actor, critic) if model], executor, rollout_id, per_epoch)

        if publish_due:
            if more and not ask_later:
                await pending  # no generation straddles a publish
            await update_weights(args, actor, executor, controller, rollout_id=rollout_id)
            if more and ask_later:
                pending = await eager_create_task(generate(rollout_id + 1))

        if should_run_periodic_action(rollout_id, args.eval_interval, per_epoch, total):
            await controller.prepare_eval()
            await evals.dispatch(rollout_id, force=not more)

        if args.debug_exit_after_rollout is not None and rollout_id - first + 1 >= args.debug_exit_after_rollout:
            logger.info("--debug-exit-after-rollout %d: stopping after rollout %d", args.debug_exit_after_rollout, rollout_id)
            break

    await evals.drain()
    for part in (executor, controller, actor, critic):
        if part is not None:
            await part.dispose()
    await shutdown_worker_manager(manager)


async def train_on(args: RunConfig, actor: Any, critic: Any, rollout_id: int, data: Any) -> None:
    """Critic first: the actor's advantages need its values. Then the rollout's data is freed."""
    if critic is None:
        await actor.train(rollout_id, data)
    else:
        values = await critic.train(rollout_id, data)
        if args.offload_train:
            await critic.offload()
        if rollout_id >= args.num_critic_only_steps:
            await actor.train(rollout_id, data, external_data=values)
            if args.offload_train:
                await actor.offload()
        remove_train_output_refs(values)
    remove_rollout_data_refs(args, data)


async def save_if_due(args: RunConfig, models: list[Any], executor: Any, rollout_id: int, per_epoch: int | None) -> None:
    """Save periodically, at the end, and whenever the sentinel file asks for it."""
    request = claimed(args.save_trigger_sentinel)
    asked = request is not None
    if not asked and not should_run_periodic_action(rollout_id, args.save_interval, per_epoch, args.num_rollout):
        return
    now = asked or rollout_id + 1 == args.num_rollout
    for model in models:
        if args.use_critic and args.offload_train:
            await model.onload()
        await model.save_model(rollout_id, force_sync=now)
        if args.use_critic and args.offload_train:
            await model.offload()
    await executor.save(rollout_id)
    if request is not None:
        request.unlink(missing_ok=True)


def claimed(sentinel: str | None) -> Path | None:
    """The request for a save, renamed until it is saved: one that comes meanwhile asks for the next save, one whose save fails stays."""
    if sentinel is None:
        return None
    request = Path(f"{sentinel}.saving")
    with suppress(FileNotFoundError):
        Path(sentinel).replace(request)
    return request if request.exists() else None


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        asyncio.run(run(args))
    finally:
        finish_tracking()


if __name__ == "__main__":
    main()
