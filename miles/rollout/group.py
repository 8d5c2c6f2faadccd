"""One attempt at a group: its siblings side by side, each generated and scored within its own limit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Protocol

from miles.fault_tolerance.kill_points import reached
from miles.rewards.reward import GroupRewardError
from miles.rollout.carried import Carried, going_on, hand_over, is_open
from miles.rollout.context import RequestRouter, RolloutContext
from miles.rollout.generate import EngineCall, EngineFailed, PromptRefused, response_text
from miles.rollout.verdicts import GroupFailed
from miles.tracking.clock import now
from miles.types import Completion, GenerateRequest, PromptGroup, Sample, SampleStatus

logger = logging.getLogger(__name__)

DEAF_AFTER = 2.0
"""Seconds that cancelled code gets to end."""


class Seat(Protocol):
    """A sample's way to the engines. In a wave it also says when the sample asks no more."""

    async def send(self, request: GenerateRequest) -> Completion: ...

    def leave(self) -> None:
        """Called once the sample has been generated, also after a failure. Idempotent."""
        ...


class OpenSeat:
    """Straight to the router: nobody waits for anybody."""

    __slots__ = ("router",)

    def __init__(self, router: RequestRouter):
        self.router = router

    async def send(self, request: GenerateRequest) -> Completion:
        return await self.router.generate(request)

    def leave(self) -> None:
        pass


async def run_group(
    context: RolloutContext, group: PromptGroup, seats: Sequence[Seat], name: str, carried: Sequence[Carried] | None = None
) -> None:
    """Fill and score every sample of `group` that is not done yet. `name` is the namespace of its requests.

    Args:
        carried: for each sample, what earlier attempts left, and where this one leaves its tokens if its time is over. None: they go.

    Raises:
        GroupFailed: the engine refused or failed, a limit passed, or the scorer asks for another attempt. Open seats: the
            other siblings are cut off first, and their requests aborted. In a wave they run to their end, because
            the moment of a cut would decide what is computed beside what.
        Exception: anything else is a fault of the run (a bug in a user's function, a failing reward) and ends it.
    """
    stages = [GENERATING if is_open(sample) else DONE for sample in group.samples]
    kept = carried or [Carried() for _ in group.samples]
    running = [place for place, stage in enumerate(stages) if stage is not DONE]
    siblings = [
        run_sample(context, group.samples[place], seats[place], _call(context, group, place, seats[place], kept[place], name=name), stages)
        for place in running
    ]
    group.times.started = group.times.started or now()
    in_wave = not isinstance(seats[0], OpenSeat)
    limit = context.group_limit
    at_limit = partial(hand_over, context.router, kept) if carried is not None else None
    try:
        await side_by_side(siblings, (PromptRefused, EngineFailed, GroupRewardError) if in_wave else (), limit, at_limit)
    except LimitPassed as error:
        late = ", ".join(f"{group.samples[running[place]].sample_index} {stages[running[place]]}" for place in error.unfinished)
        done = [place for place, stage in enumerate(stages) if stage is DONE]
        raise GroupFailed(
            group.group_index, "timeout", f"not done within --sample-timeout {limit:g} s: sample {late}", again=True, done=done
        ) from None
    except PromptRefused as error:
        raise GroupFailed(group.group_index, "refused", str(error), again=False) from error
    except EngineFailed as error:
        done = [place for place, stage in enumerate(stages) if stage is DONE]
        raise GroupFailed(group.group_index, "engine", str(error), again=True, done=done) from error
    except GroupRewardError as error:
        raise GroupFailed(group.group_index, "reward", str(error), again=True) from error


GENERATING, SCORING, DONE = "generating", "being scored", "done"


async def run_sample(context: RolloutContext, sample: Sample, seat: Seat, call: EngineCall, stages: list[str]) -> None:
    try:
        await context.generate(sample, call)
    finally:
        seat.leave()
    check_sample(sample)
    if not sample.response and sample.response_ids:
        sample.response = response_text(context.tokenizer, sample.response_ids)
    stages[call.place] = SCORING
    generated = now()
    reached(context.args, "generated", sample.group_index)
    if context.teacher is None:
        await context.scorer.score(sample)
    else:
        await side_by_side([context.scorer.score(sample), context.teacher.score(sample)])
    reached(context.args, "scored", sample.group_index)
    stages[call.place] = DONE
    call.times.generated, call.times.scored = generated, now()  # the last sibling's stay


def check_sample(sample: Sample) -> None:
    """Columns of one length, and a status: the promise of a GenerateFn. Raises ValueError that names what is off."""
    tokens = len(sample.response_ids)
    if len(sample.loss_mask) != tokens or len(sample.rollout_logprobs) != tokens:
        raise ValueError(
            f"--generate-function left sample {sample.sample_index} with {tokens} response_ids, {len(sample.loss_mask)} in loss_mask and "
            f"{len(sample.rollout_logprobs)} rollout_logprobs"
        )
    if sample.status is SampleStatus.PENDING:
        raise ValueError(f"--generate-function left sample {sample.sample_index} pending: it must set sample.status")


class LimitPassed(Exception):
    """Not everything was done in time; `unfinished` are the places of what was cut off."""

    def __init__(self, unfinished: list[int]):
        super().__init__(unfinished)
        self.unfinished = unfinished


async def side_by_side(
    work: Sequence[Coroutine[Any, Any, None]],
    tolerated: tuple[type[BaseException], ...] = (),
    limit: float | None = None,
    at_limit: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Run all and raise the first failure by place. A failure cuts off the rest at once, a tolerated one lets them finish.

    Nothing runs on when this returns or is cancelled. Raises LimitPassed after `limit` seconds, when `at_limit` has been awaited.
    """
    tasks = [asyncio.ensure_future(item) for item in work]
    waiting: set[asyncio.Future[None]] = set(tasks)
    clock = asyncio.get_running_loop().time
    end = None if limit is None else clock() + limit
    try:
        while waiting:
            rest = None if end is None else max(end - clock(), 0)
            done, waiting = await asyncio.wait(waiting, timeout=rest, return_when=asyncio.FIRST_EXCEPTION)
            if any((error := task.exception()) is not None and not isinstance(error, tolerated) for task in done):
                break
            if not done:
                late = [place for place, task in enumerate(tasks) if not task.done()]
                if at_limit is not None:
                    await at_limit()
                raise LimitPassed(late)
        failures = [error for task in tasks if task.done() and (error := task.exception()) is not None]
        if failures:
            raise next((error for error in failures if not isinstance(error, tolerated)), failures[0])
    finally:
        if waiting:
            await cut_off(tasks)
        for task in tasks:
            if task.done() and not task.cancelled():
                task.exception()  # looked at: what failed while all were cut off is nobody's news


async def cut_off(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel what still runs, and await it; code that will not be cancelled is left behind after a while."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running and (deaf := (await asyncio.wait(running, timeout=DEAF_AFTER))[1]):
        logger.warning("%d tasks go on although they were cancelled; the first: %s", len(deaf), next(iter(deaf)))


def renewed(group: PromptGroup) -> PromptGroup:
    """The same draw, empty, for its next attempt."""
    return going_on(group, ())


def _call(context: RolloutContext, group: PromptGroup, place: int, seat: Seat, carried: Carried, *, name: str) -> EngineCall:
    return EngineCall(
        name=f"{name}-g{group.group_index}.{group.attempt}.{place}",
        place=place,
        sampling=context.sampling,
        seed_key=(context.seed, group.group_index, place, group.attempt),
        max_context=context.args.engine_max_context,
        send=seat.send,
        times=group.times,
        carried=carried,
    )
