"""Spreads requests over engines: siblings and turns together, the rest where there is room."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles.engines.least_busy import LeastBusy
from miles.protocols import Engine, ProcessGone, ProcessReplaced
from miles.types import Completion, FinishReason, GenerateRequest

logger = logging.getLogger(__name__)

REMEMBERED = 4096
"""Affinities whose engine is remembered; the longest unused is forgotten first."""

LONGEST_SHUNNED = 60.0
"""Seconds for which an engine that fails again and again is passed over, where another is live."""


class NoEngineError(RuntimeError):
    """No engine is left that could serve a request."""


class EngineLost(RuntimeError):
    """The engine was given up while it had the request; another one may answer it."""


@dataclass(slots=True)
class _Place:
    """One engine and what the router has sent it."""

    engine: Engine
    live: bool = True
    failures: int = 0  # in a row
    shunned_until: float = 0.0  # time of the event loop
    running: int = 0  # let in and not answered
    inside: dict[asyncio.Task[Any], None] = field(default_factory=dict)  # who awaits an answer of the engine
    lost: set[asyncio.Task[Any]] = field(default_factory=set)  # of those, whom `mark` woke
    queue: OrderedDict[str, asyncio.Future[bool]] = field(default_factory=OrderedDict)  # waiting for room: True to go, False when aborted


class Router:
    """Sends each request to one engine and comes back with its completion.

    A new affinity goes to the least busy live engine (the lowest index among equals), and stays there; an engine that has just
    failed is passed over for a while. At most `max_running` requests are
    inside one engine at once; the others wait here, in order. Requests of a wave carry their engine's index: the caller
    places them (`engine_for`), as their number must be known before the first is sent; they are not held back, as a wave
    starts only when it is complete, and not retried elsewhere, as their wave is lost with its engine.

    Args:
        engines: in the order of their indices.
        max_running: requests inside one engine at once.
        retries: times that a request is sent to another engine after one failed under it.
        patience: seconds that a request waits for a live engine while there is none.
    """

    def __init__(self, engines: Sequence[Engine], max_running: int = 256, retries: int = 2, patience: float = 0.0) -> None:
        if not engines:
            raise ValueError("a router needs at least one engine")
        self._places = [_Place(engine) for engine in engines]
        self._max_running = max_running
        self._retries = retries
        self._patience = patience
        self._homes: OrderedDict[str, int] = OrderedDict()  # affinity -> engine index
        self._sent: dict[str, int] = {}  # request id -> engine index
        self._live = list(range(len(engines)))
        self._busy = LeastBusy(len(engines))  # has in it who is live and not shunned
        self._shunned: set[int] = set()
        self._revived = asyncio.Event()  # cleared by the first that waits for an engine
        self._revived.set()

    @property
    def num_engines(self) -> int:
        return len(self._places)

    def engine_for(self, position: int) -> int:
        """The engine index of the group at this position of a wave: live engines in turn."""
        if not self._live:
            raise NoEngineError("no engine is live")
        return self._live[position % len(self._live)]

    @property
    def live(self) -> list[int]:
        return list(self._live)

    def mark(self, index: int, *, live: bool) -> None:
        """Told by whoever watches the engines: an engine that is not live gets nothing new, and what it has goes to others.

        One that is live again was started anew, or found well: what failed before is not held against it.
        """
        place = self._places[index]
        if live:
            place.failures, place.shunned_until = 0, 0.0
            self._shunned.discard(index)
        self._set_live(index, live=live)
        if live:
            self._revived.set()
            return
        place.lost = {waiter for waiter in place.inside if waiter.cancel()}
        for request_id, go in place.queue.items():
            if not go.done():
                go.set_exception(EngineLost(f"engine {index} was lost while request {request_id} waited for it"))

    async def ready(self) -> None:
        """Wait until an engine is live: one that was lost may be started again.

        Raises:
            NoEngineError: none was within `patience`.
        """
        if self._live:
            return
        if self._revived.is_set() and self._patience > 0:
            logger.warning("no engine is live: waiting up to %g s for one to be started again", self._patience)
        self._revived.clear()
        try:
            await asyncio.wait_for(self._revived.wait(), self._patience)
        except TimeoutError:
            raise NoEngineError(f"no engine is live, and none came back within {self._patience:g} s") from None

    def in_flight(self) -> dict[str, int]:
        """Request id -> index of the engine that has it."""
        return dict(self._sent)

    async def generate(self, request: GenerateRequest, engine_index: int | None = None) -> Completion:
        """One completion.

        Args:
            engine_index: the engine to use; needed for a request with a wave.

        Raises:
            ValueError: the request can never work; it is not tried elsewhere.
            NoEngineError: no live engine is left, and none came back.
            RuntimeError, OSError: what the last engine failed with, once the retries are used up.
        """
        assert engine_index is not None or request.wave is None, "who sends a wave chooses the engines"
        if engine_index is not None:
            return await self._send(engine_index, request)
        tried: list[int] = []
        while True:
            await self.ready()
            index = self._choose(request.affinity, tried)
            try:
                return await self._send_anew(index, request)
            except (RuntimeError, OSError) as error:  # the engine, not the request: a dead worker, a lost connection, a step that failed
                tried.append(index)
                self._shun(index)
                self._homes.pop(request.affinity, None)
                if len(tried) > self._retries or not set(self._live) - set(tried):
                    raise
                logger.warning("engine %d failed under request %s (%r); trying another", index, request.request_id, error)

    async def abort(self, request_ids: Iterable[str] | None = None) -> int:
        """Cut requests off (None: all). Returns how many were; an engine that fails at this counts none."""
        chosen = None if request_ids is None else set(request_ids)
        cut = sum(self._abort_queued(place, chosen) for place in self._places)
        by_engine: dict[int, list[str]] = {}
        for request_id, index in self._sent.items():
            if chosen is None or request_id in chosen:
                by_engine.setdefault(index, []).append(request_id)
        calls = [self._places[index].engine.abort(ids) for index, ids in by_engine.items()]
        results = await asyncio.gather(*calls, return_exceptions=True)
        for index, result in zip(by_engine, results, strict=True):
            if isinstance(result, BaseException):
                logger.warning("engine %d could not abort: %r", index, result)
        return cut + sum(result for result in results if isinstance(result, int))

    def _abort_queued(self, place: _Place, chosen: set[str] | None) -> int:
        going = [go for request_id, go in place.queue.items() if (chosen is None or request_id in chosen) and not go.done()]
        for go in going:
            go.set_result(False)
        return len(going)

    def _choose(self, affinity: str, tried: list[int]) -> int:
        home = self._homes.get(affinity) if affinity else None
        if home is not None and self._places[home].live and home not in tried:
            self._homes.move_to_end(affinity)
            return home
        index = self._least_busy(tried)
        if affinity:
            self._homes[affinity] = index
            if len(self._homes) > REMEMBERED:
                self._homes.popitem(last=False)
        return index

    def _least_busy(self, tried: Sequence[int]) -> int:
        """The engine with the least to do; one that is shunned only where there is no other."""
        now = asyncio.get_running_loop().time()
        for index in [index for index in self._shunned if self._places[index].shunned_until <= now]:
            self._shunned.discard(index)
            if self._places[index].live:
                self._busy.put_in(index)
        least = self._busy.least()
        if least is not None and least not in tried:
            return least
        candidates = [index for index in self._live if index not in tried]
        if not candidates:
            raise NoEngineError("no engine is live")
        return min(candidates, key=lambda index: (index in self._shunned, self._busy.loads[index]))

    def _set_live(self, index: int, *, live: bool) -> None:
        self._places[index].live = live
        self._live = [index for index, place in enumerate(self._places) if place.live]
        if live and index not in self._shunned:
            self._busy.put_in(index)
        elif not live:
            self._busy.take_out(index)

    def _shun(self, index: int) -> None:
        """An idle engine that fails at once would draw every new request: others go first for a while, longer each time."""
        place, now = self._places[index], asyncio.get_running_loop().time()
        if place.shunned_until > now:  # all that it had fails at once, which is one failure
            return
        place.failures += 1
        place.shunned_until = now + min(2.0**place.failures, LONGEST_SHUNNED)
        self._shunned.add(index)
        self._busy.take_out(index)

    async def _send_anew(self, index: int, request: GenerateRequest) -> Completion:
        """As `_send`, and again where a process that is well has taken the place of the one that was asked."""
        try:
            return await self._send(index, request)
        except ProcessReplaced:
            if not self._places[index].live:
                raise
            return await self._send(index, request)

    async def _send(self, index: int, request: GenerateRequest) -> Completion:
        """Wait for room in an engine, then ask it. Whoever leaves lets the next one in."""
        place = self._places[index]
        self._busy.change(index, 1)
        try:
            if request.wave is not None:
                place.running += 1
            elif not await self._enter(place, request.request_id):
                return Completion(request.request_id, [], [], FinishReason.ABORT, [])
            try:
                return await self._ask(index, place, request)
            finally:
                self._leave(place)
        finally:
            self._busy.change(index, -1)

    async def _ask(self, index: int, place: _Place, request: GenerateRequest) -> Completion:
        """In the caller's own task: `mark` wakes it when the engine is given up."""
        task = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        self._sent[request.request_id] = index
        place.inside[task] = None
        try:
            completion = await place.engine.generate(request)
            completion.engine, place.failures = index, 0
            return completion
        except asyncio.CancelledError:
            cancelling = task.uncancel() if task in place.lost else task.cancelling()
            if place.live or cancelling > before:
                raise
            raise EngineLost(f"engine {index} was lost while it had request {request.request_id}") from None
        except ProcessGone:
            self._set_live(index, live=False)  # before whoever watches it notices; that it is back is told by `mark`
            raise
        finally:
            place.inside.pop(task, None)
            place.lost.discard(task)
            del self._sent[request.request_id]

    async def _enter(self, place: _Place, request_id: str) -> bool:
        """Wait in order until there is room, and take it. False: aborted meanwhile."""
        if place.running < self._max_running and not place.queue:
            place.running += 1
            return True
        go = place.queue[request_id] = asyncio.get_running_loop().create_future()
        self._let_in(place)
        try:
            return await go
        except asyncio.CancelledError:
            if go.done() and not go.cancelled() and go.result():
                self._leave(place)
            raise
        finally:
            del place.queue[request_id]

    def _leave(self, place: _Place) -> None:
        place.running -= 1
        self._let_in(place)

    def _let_in(self, place: _Place) -> None:
        for go in place.queue.values():
            if place.running >= self._max_running:
                return
            if not go.done():
                place.running += 1
                go.set_result(True)
