"""Waves: requests that are known together go out together, so that batches in the engines do not depend on timing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from miles.rollout.context import RequestRouter, RolloutContext
from miles.rollout.group import run_group, side_by_side
from miles.rollout.verdicts import GroupFailed
from miles.types import Completion, GenerateRequest, PromptGroup, Wave


async def run_wave(context: RolloutContext, name: str, groups: Sequence[PromptGroup]) -> list[GroupFailed | None]:
    """Fill and score `groups` in lockstep. Returns each group's failure, or None where it succeeded.

    `name` is unique in the run; it names the waves and requests. While no engine lives, it waits for one.
    """
    await context.router.ready()
    args = context.args
    patience = args.sample_timeout * (2 if args.deterministic else 0.25)  # past the limit itself: nobody is left behind
    table = WaveTable(name, context.router, patience)
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
        table.close()
        del context.tables[name]
    return failures


Place = tuple[int, int]
"""Position of the group in the table, place of the sample among its siblings."""


class Ticket(NamedTuple):
    """What an asker gets when its wave goes: its request with the wave on it, and the engine to send it to."""

    request: GenerateRequest
    engine: int


class WaveTable:
    """The samples of some groups, in lockstep over their turns.

    Consumes requests of seated samples; as soon as every seated sample waits with a request or has left, it lets them all go as
    one wave per engine. So the first wave holds every sample, and the wave of turn t those that have one. Group p goes to
    the live engine p modulo their number; on each engine requests are ordered by group, then sibling.

    A sample whose environment keeps the others waiting for longer than `patience` seconds is left behind: the wave goes
    without it, and it is not counted until it asks again.
    """

    def __init__(self, name: str, router: RequestRouter, patience: float):
        self.name = name
        self.router = router
        self.patience = patience
        self.seated: set[Place] = set()  # who is waited for
        self.asking: dict[Place, list[tuple[GenerateRequest, asyncio.Future[Ticket]]]] = {}
        self.waves = 0
        self.in_engines = 0
        self.timer: asyncio.TimerHandle | None = None

    def seat(self, position: int, place: int) -> WaveSeat:
        """Seat sample `place` of group `position`. All samples are seated before the first of them asks."""
        self.seated.add((position, place))
        return WaveSeat(self, (position, place))

    def ask(self, place: Place, request: GenerateRequest) -> asyncio.Future[Ticket]:
        loop = asyncio.get_running_loop()
        go: asyncio.Future[Ticket] = loop.create_future()
        self.seated.add(place)
        self.asking.setdefault(place, []).append((request, go))
        if self.timer is None:
            self.timer = loop.call_later(self.patience, self.go)
        self.go_if_complete()
        return go

    def leave(self, place: Place) -> None:
        self.seated.discard(place)
        self.asking.pop(place, None)
        self.go_if_complete()

    def go_if_complete(self) -> None:
        if self.asking and len(self.asking) == len(self.seated):
            self.go()

    def go(self) -> None:
        """Send who asks, as one wave on each engine."""
        asking, self.asking = self.asking, {}
        self.seated = set(asking)
        self.close()
        wave_id = f"{self.name}.w{self.waves}"
        self.waves += 1
        by_engine: dict[int, list[tuple[GenerateRequest, asyncio.Future[Ticket]]]] = {}
        for place in sorted(asking):
            waiting = [entry for entry in asking[place] if not entry[1].done()]
            try:
                by_engine.setdefault(self.router.engine_for(place[0]), []).extend(waiting)
            except RuntimeError as error:  # the last engine is gone: everybody hears of it, whoever's request made the wave complete
                for _, go in waiting:
                    go.set_exception(error)
        for engine, mine in by_engine.items():
            for order, (request, go) in enumerate(mine):
                go.set_result(Ticket(replace(request, wave=Wave(wave_id, len(mine), order)), engine))

    def close(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def stats(self) -> dict[str, int]:
        asking = len(self.asking)
        return {"samples_in_environments": len(self.seated) - asking, "samples_waiting": asking, "requests_in_engines": self.in_engines}


class WaveSeat:
    __slots__ = ("place", "table")

    def __init__(self, table: WaveTable, place: Place):
        self.table = table
        self.place = place

    async def send(self, request: GenerateRequest) -> Completion:
        table = self.table
        ticket = await table.ask(self.place, request)
        table.in_engines += 1
        try:
            return await table.router.generate(ticket.request, ticket.engine)
        finally:
            table.in_engines -= 1

    def leave(self) -> None:
        self.table.leave(self.place)
