"""The publish: trainers' weights to the engines, in buckets, proved by checksums."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from miles.config import metrics_file
from miles.config.periodic import should_run_periodic_action
from miles.config.run_config import RunConfig
from miles.fault_tolerance.kill_points import reached
from miles.protocols import Engine, ProcessGone
from miles.ray import run as runs
from miles.ray.rollout.eval_dispatch import EvalDispatcher, Evaluator, Exporter
from miles.ray.worker_handle import CallTimeout, WorkerDied, WorkerHandle
from miles.ray.worker_manager import all_or_first_error
from miles.types import PublishPlan
from miles.weights.compare import compare_checksums

logger = logging.getLogger(__name__)


Pause = Callable[[], Awaitable[Sequence[Engine]]]
"""Pauses the engines of a publish. Returns those that live."""


class Publisher(Exporter, Protocol):
    """The actor, as a publish sees it."""

    async def update_weights(self, engines: Sequence[Engine], rollout_id: int | None = None, pause: Pause | None = None) -> int: ...


class Executor(Evaluator, Protocol):
    async def quiet(self) -> None: ...

    async def set_weight_version(self, version: int) -> None: ...


class Controller(Protocol):
    async def start_update_weights(self) -> Sequence[Engine]: ...

    async def pause_engines(self) -> Sequence[Engine]: ...

    async def end_update_weights(self, weight_version: int) -> None: ...

    async def prepare_eval(self) -> None: ...

    async def abort_update_weights(self) -> None: ...

    def on_resume(self, republish: Callable[[Engine], Awaitable[int]]) -> None: ...


class EngineLost(RuntimeError):
    """An engine died in the middle of a publish, or was ended because it was silent; the others can go on without it."""


def version_after(args: RunConfig, rollout_id: int | None) -> int:
    """The version of the publish after `rollout_id`; None: of the first one of this process.

    Version 1 is the first publish of a run. A resumed run counts on where an uninterrupted one would be.
    """
    done = (args.start_rollout_id or 0) if rollout_id is None else rollout_id + 1
    return done // args.update_weights_interval + 1


async def update_weights(
    args: RunConfig, actor: Publisher, executor: Executor, controller: Controller, rollout_id: int | None = None
) -> None:
    """One publish: weights made ready, engines paused, weights moved and compared, engines resumed, the executor told.

    A failed one is tried again up to `publish_retries` times; engines that died on the way are left to the controller.
    """
    run = runs.current()
    guard = run.guard
    await guard.halt_if_asked()
    await executor.quiet()
    failures = 0
    while True:
        engines = await guard.watch(controller.start_update_weights())
        try:
            _reached(args, "before_publish", rollout_id)
            async with asyncio.timeout(args.publish_timeout):
                version = await guard.watch(actor.update_weights(engines, rollout_id, controller.pause_engines))
            break
        except EngineLost as error:
            logger.warning("publishing again without a lost engine: %s", error)
            await controller.abort_update_weights()
        except Exception as error:
            await controller.abort_update_weights()
            failures += 1
            if failures > args.publish_retries or isinstance(error, WorkerDied):
                if isinstance(error, TimeoutError) and not str(error):
                    limit = f"{args.publish_timeout:g} s (--publish-timeout)"
                    raise TimeoutError(f"a publish took longer than {limit}\n{await runs.current().manager.stacks()}") from error
                raise
            logger.warning("a publish failed and is tried again (%d of %d): %s", failures, args.publish_retries, error)
    run.published = rollout_id
    await guard.watch(controller.end_update_weights(version))
    _reached(args, "after_publish", rollout_id)
    await executor.set_weight_version(version)
    controller.on_resume(lambda engine: _republish(args, actor, engine))
    if rollout_id is None:
        await _evaluate_if_missed(args, actor, executor, controller)


async def _evaluate_if_missed(args: RunConfig, actor: Publisher, executor: Executor, controller: Controller) -> None:
    """An evaluation comes after its rollout's save: a run that was killed between the two makes up for it before it goes on."""
    last = (args.start_rollout_id or 0) - 1
    if not args.goes_on or last < 0 or metrics_file.has_eval(metrics_file.read(args.run_dir), last):
        return
    if should_run_periodic_action(last, args.eval_interval, runs.current().per_epoch, args.num_rollout):
        logger.info("the evaluation after rollout %d is made up for", last)
        await controller.prepare_eval()
        evals = EvalDispatcher(args, actor, executor)
        await evals.dispatch(last, force=True)
        await evals.drain()


def _reached(args: RunConfig, point: str, rollout_id: int | None) -> None:
    """The first publish of a process is not of a rollout."""
    reached(args, point, -1 if rollout_id is None else rollout_id)


async def _republish(args: RunConfig, actor: Publisher, engine: Engine) -> int:
    """The weights of this moment to one engine that was started again, under the version that they have or will have."""
    run = runs.current()
    async with run.trainers_idle:
        trained = run.trained_through
        due = trained is not None and (trained + 1) % args.update_weights_interval == 0
        return await actor.update_weights([engine], trained if due else run.published)


async def move(
    args: RunConfig,
    trainers: Sequence[WorkerHandle],
    engines: Sequence[Engine],
    version: int,
    *,
    end_engine: Callable[[Engine], Awaitable[None]],
    pause: Pause | None = None,
    one_host: bool = True,
) -> None:
    """Move all buckets and compare both ends. After a failure both ends have been told to give up.

    Args:
        pause: None: the engines are paused.
        end_engine: ends the worker of an engine that is silent. Until then a trainer may be stuck in a collective with it.
    """
    try:
        plans: list[PublishPlan] = await all_or_first_error([trainer.plan_publish(version, len(engines), one_host) for trainer in trainers])
        plan = plans[0]
        receivers = _Receivers(args, engines, end_engine)
        if plan.staged:  # the engines go on decoding while everything is made ready
            for index in range(len(plan.buckets)):
                await all_or_first_error([trainer.send_bucket(index) for trainer in trainers])
            sums = (await all_or_first_error([trainer.end_publish() for trainer in trainers]))[0]
            await receivers.call("begin_update", lambda place: (plan, place))
            await _paused(pause, engines)
        else:
            await _paused(pause, engines)
            await receivers.call("begin_update", lambda place: (plan, place))
            await (_side_by_side if plan.concurrent else _one_after_the_other)(plan, trainers, receivers)
            sums = (await all_or_first_error([trainer.end_publish() for trainer in trainers]))[0]
        received = await receivers.call("end_update")
        if args.verify_weight_updates:
            for place, table in enumerate(received):
                comparison = compare_checksums(sums, table)
                if not comparison.equal:
                    raise RuntimeError(f"weights of version {version} arrived wrong at engine {place} of {len(engines)}: {comparison}")
    except BaseException:
        ends = [trainer.abort_publish() for trainer in trainers] + [engine.abort_update() for engine in engines]
        await asyncio.gather(*ends, return_exceptions=True)
        raise


async def _paused(pause: Pause | None, engines: Sequence[Engine]) -> None:
    if pause is not None and len(await pause()) < len(engines):
        raise EngineLost("it could not be paused")


class _Receivers:
    """The engines of one publish. Each call on them may take as long as the publish, as long as they answer meanwhile."""

    def __init__(self, args: RunConfig, engines: Sequence[Engine], end: Callable[[Engine], Awaitable[None]]) -> None:
        self._args, self._engines, self._end = args, engines, end

    async def call(self, method: str, args_of: Callable[[int], tuple[Any, ...]] = lambda place: ()) -> list[Any]:
        """Raises EngineLost for an engine that died, or is silent."""
        calls = [self._one(engine, method, args_of(place)) for place, engine in enumerate(self._engines)]
        return await all_or_first_error(calls)

    async def receive(self, index: int) -> list[Any]:
        return await self.call("receive_bucket", lambda place: (index,))

    async def _one(self, engine: Engine, method: str, args: tuple[Any, ...]) -> Any:
        task = asyncio.ensure_future(getattr(engine, method)(*args))
        started, limit = time.monotonic(), self._args.bucket_timeout if method == "receive_bucket" else math.inf
        try:
            while not (await asyncio.wait({task}, timeout=min(self._args.control_timeout, limit)))[0]:
                await self._listen(engine, method)
                if time.monotonic() - started >= limit:
                    await self._end(engine)
                    raise EngineLost(f"a bucket was not received within {limit:g} s (--bucket-timeout)")
            return task.result()
        except ProcessGone as error:
            raise EngineLost(str(error)) from error
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _listen(self, engine: Engine, method: str) -> None:
        """Health answers whatever an engine does: one that does not is ended, so that it never comes back with half of the weights."""
        for asked in range(1, self._args.health_failures + 1):
            try:
                await engine.health()
                return
            except CallTimeout as error:
                if asked == self._args.health_failures:
                    await self._end(engine)
                    raise EngineLost(f"no sign of life during {method}: {error}") from error


async def _side_by_side(plan: PublishPlan, trainers: Sequence[WorkerHandle], receivers: _Receivers) -> None:
    for index in range(len(plan.buckets)):
        receiving = asyncio.ensure_future(receivers.receive(index))
        await all_or_first_error([trainer.send_bucket(index) for trainer in trainers] + [_result_of(receiving)])


async def _one_after_the_other(plan: PublishPlan, trainers: Sequence[WorkerHandle], receivers: _Receivers) -> None:
    """While the engines read bucket i, the trainers fill bucket i + 1: two buffers are enough."""
    reading: asyncio.Future[Any] | None = None
    try:
        for index in range(len(plan.buckets)):
            await all_or_first_error([trainer.send_bucket(index) for trainer in trainers])
            if reading is not None:
                await reading
            reading = asyncio.ensure_future(receivers.receive(index))
        if reading is not None:
            await reading
    finally:
        if reading is not None and not reading.done():
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


async def _result_of(future: asyncio.Future[Any]) -> Any:
    return await future
