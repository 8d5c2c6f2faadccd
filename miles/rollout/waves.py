"""Waves: requests that are known together go out together, so that batches in the engines do not depend on timing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from miles.rollout.context import RequestRouter, RolloutContext
from miles.rollout.group import cut_off, run_group, side_by_side
from miles.rollout.verdicts import GroupFailed
from miles.types import Completion, GenerateRequest, PromptGroup, Wave


async def run_wave(context: RolloutContext, name: str, groups: Sequence[PromptGroup]) -> list[GroupFailed | None]:
    """Fill and score `groups` in lockstep. Returns each group's failure, or None where it succeeded.

    `name` is unique in the run; it names the waves and requests.
    """
    table = WaveTable(name, context.router)
    seats = [[table.seat(position, place) for place in range(len(group.samples))] for position, group in enumerate(groups)]
    failures: list[GroupFailed | None] = [None] * len(groups)

    async def run(position: int) -> None:
        try:
            await run_group(context, groups[position], seats[position], name)
        except GroupFailed as failure:
            failures[position] = failure

    context.tables[name] = table
    try:
        await side_by_side([run(position) for position in range(len(groups))])
    finally:
        await table.close()
        del context.tables[name]
    return failures


class Waiting(NamedTuple):
    place: tuple[int, int]  # position of the group in the table, place among its siblings
    request: GenerateRequest
    answer: asyncio.Future[Completion]


@dataclass(slots=True)
class WaveTable:
    """The samples of some groups, in lockstep over their turns.

    Consumes one request per seated sample; as soon as every seated sample waits with a request or has left, sends them all
    as one wave per engine and forgets them. So the first wave holds every sample, and the wave of turn t those that have one.
    Group p of the table goes to the live engine p modulo their number; on each engine requests are ordered by group, then sibling.
    """

    name: str
    router: RequestRouter
    seated: int = 0
    waves: int = 0
    waiting: list[Waiting] = field(default_factory=list)
    sent: set[asyncio.Future[Completion]] = field(default_factory=set)

    def seat(self, position: int, place: int) -> WaveSeat:
        """Seat sample `place` of group `position`. All samples must be seated before the first of them asks."""
        self.seated += 1
        return WaveSeat(self, (position, place))

    def flush_if_complete(self) -> None:
        if not self.waiting or len(self.waiting) < self.seated:
            return
        waiting, self.waiting = sorted(self.waiting, key=lambda item: item.place), []
        wave_id = f"{self.name}.w{self.waves}"
        self.waves += 1
        by_engine: dict[int, list[Waiting]] = {}
        for item in waiting:
            by_engine.setdefault(self.router.engine_for(item.place[0]), []).append(item)
        for engine, mine in by_engine.items():
            for order, item in enumerate(mine):
                self._dispatch(replace(item.request, wave=Wave(wave_id, len(mine), order)), engine, item.answer)

    def _dispatch(self, request: GenerateRequest, engine: int, answer: asyncio.Future[Completion]) -> None:
        """Send on behalf of the asker, also when it has gone by now: the engine waits for the whole wave."""
        task = asyncio.ensure_future(self.router.generate(request, engine))
        self.sent.add(task)
        task.add_done_callback(self.sent.discard)
        task.add_done_callback(partial(_deliver, answer))
        answer.add_done_callback(partial(_asker_left, task))

    def stats(self) -> dict[str, int]:
        return {"samples_seated": self.seated, "samples_waiting_for_the_wave": len(self.waiting), "requests_in_engines": len(self.sent)}

    async def close(self) -> None:
        """Cut off what is still under way."""
        await cut_off(list(self.sent))


@dataclass(slots=True)
class WaveSeat:
    table: WaveTable
    place: tuple[int, int]
    left: bool = False

    async def send(self, request: GenerateRequest) -> Completion:
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.table.waiting.append(Waiting(self.place, request, answer))
        self.table.flush_if_complete()
        return await answer

    def leave(self) -> None:
        if self.left:
            return
        self.left = True
        self.table.seated -= 1
        self.table.waiting = [item for item in self.table.waiting if item.place != self.place]
        self.table.flush_if_complete()


def _deliver(answer: asyncio.Future[Completion], task: asyncio.Future[Completion]) -> None:
    if task.cancelled():
        answer.cancel()
    elif (error := task.exception()) is not None:
        if not answer.done():
            answer.set_exception(error)
    elif not answer.done():
        answer.set_result(task.result())


def _asker_left(task: asyncio.Future[Completion], answer: asyncio.Future[Completion]) -> None:
    """Cut the request off, but only after its task has had its first step: a wave must arrive whole."""
    if answer.cancelled() and not task.done():
        asyncio.get_running_loop().call_soon(task.cancel)
