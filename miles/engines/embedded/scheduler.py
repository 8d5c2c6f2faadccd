"""Who has a slot, and what the next forward pass computes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from miles.engines.embedded.attention import Chunk
from miles.engines.embedded.cache import SlotCache
from miles.engines.embedded.sequence import Sequence, shared_prefix
from miles.types import FinishReason, Wave

WORTH_SHARING = 8
"""Shared tokens below which a prefix is computed again rather than waited for."""


@dataclass(slots=True)
class WaveQueue:
    """The requests of one wave that this engine knows of."""

    size: int
    orders: set[int] = field(default_factory=set)  # who arrived, also those that were refused or cut off before they could start
    members: dict[int, Sequence] = field(default_factory=dict)  # by order; not yet admitted

    @property
    def complete(self) -> bool:
        return len(self.orders) == self.size


@dataclass(slots=True)
class Plan:
    """What one forward pass computes."""

    decodes: list[Chunk] = field(default_factory=list)  # one token each, in the order of their slots
    prefills: list[Chunk] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.decodes or self.prefills)


class Scheduler:
    """Admits requests into slots and keeps the used slots dense: `running[s]` is in slot s of the cache.

    Requests without a wave are admitted as they come. A wave starts when it is complete and nothing else runs, is admitted by
    order, and has the engine for itself: what it computes, and in which batches, is a function of the wave alone. Waves run
    one after another, the first complete one first.
    """

    def __init__(self, cache: SlotCache, max_running: int, prefill_tokens: int) -> None:
        self.cache = cache
        self.max_running = max_running
        self.prefill_tokens = prefill_tokens
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.waves: dict[str, WaveQueue] = {}  # by arrival of their first request
        self.active_wave: str | None = None
        self.num_prefilled = 0  # prompt tokens computed, for metrics
        self._admitted = 0
        self._loose_first = False  # a wave just ended: those who waited for it go before the next one

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + sum(len(wave.members) for wave in self.waves.values())

    def add(self, sequence: Sequence) -> None:
        wave = sequence.request.wave
        if wave is None:
            self.waiting.append(sequence)
        else:
            self.note_arrival(wave).members[wave.order] = sequence

    def note_arrival(self, wave: Wave) -> WaveQueue:
        """Count one request of a wave; called alone for one that was refused, so that the others do not wait for it.

        Raises:
            ValueError: the wave's requests contradict each other.
        """
        queue = self.waves.get(wave.wave_id) or WaveQueue(wave.size)
        if wave.size != queue.size or not 0 <= wave.order < wave.size or wave.order in queue.orders:
            raise ValueError(f"{wave} does not fit its wave of size {queue.size} with orders {sorted(queue.orders)}")
        self.waves[wave.wave_id] = queue
        queue.orders.add(wave.order)
        return queue

    def has_work(self) -> bool:
        return bool(self.running or self._next_admissions())

    def _next_admissions(self) -> list[Sequence]:
        """Who may start now, slots permitting. Starts and ends waves."""
        if self.active_wave is not None:
            members = self.waves[self.active_wave].members
            if members or self.running:
                return [members[order] for order in sorted(members)]
            del self.waves[self.active_wave]
            self.active_wave, self._loose_first = None, bool(self.waiting)
        complete = next((wave_id for wave_id, wave in self.waves.items() if wave.complete), None)
        if complete is None or self._loose_first:
            return list(self.waiting)
        if self.running:
            return []
        self.active_wave = complete
        return self._next_admissions()

    def admit(self) -> None:
        free = self.max_running - len(self.running)
        if free == 0:
            return
        for sequence in self._next_admissions()[:free]:
            if self.active_wave is None:
                self.waiting.popleft()
            else:
                assert sequence.request.wave is not None
                del self.waves[self.active_wave].members[sequence.request.wave.order]
            sequence.number = self._admitted
            self._admitted += 1
            self.running.append(sequence)
        if self.active_wave is None:
            self._loose_first = False

    def plan(self) -> Plan:
        """Admit, and choose: one token for each decoding sequence, and prompt tokens within the budget, oldest first."""
        self.admit()
        plan, budget = Plan(), self.prefill_tokens
        slot_of = {id(sequence): slot for slot, sequence in enumerate(self.running)}
        for sequence in sorted((row for row in self.running if row.missing > 1), key=lambda row: row.number):
            slot = slot_of[id(sequence)]
            if self._borrow(sequence, slot) or sequence.missing == 1 or budget == 0:
                continue
            end = min(sequence.cached + budget, len(sequence.tokens))
            plan.prefills.append(Chunk(slot, sequence.cached, end))
            budget -= end - sequence.cached
        plan.decodes = [Chunk(slot, row.cached, row.cached + 1) for slot, row in enumerate(self.running) if row.missing == 1]
        self.num_prefilled += self.prefill_tokens - budget
        return plan

    def _borrow(self, sequence: Sequence, slot: int) -> bool:
        """Copy the longest prefix that another slot holds. True: an older sequence is computing a longer one; wait for it."""
        source, best, promised = -1, sequence.cached, sequence.cached
        for other_slot, other in enumerate(self.running):
            if other is sequence or other.stale:
                continue
            shared = min(shared_prefix(sequence, other), len(sequence.tokens) - 1)
            if (usable := min(shared, other.cached)) > best:
                source, best = other_slot, usable
            if other.number < sequence.number:
                promised = max(promised, shared)
        if best - sequence.cached >= WORTH_SHARING or (best > sequence.cached and best == len(sequence.tokens) - 1):
            self.cache.copy(source, slot, sequence.cached, best)
            if not sequence.num_written:
                sequence.reused += best - sequence.cached
            sequence.cached = best
        return promised - sequence.cached >= WORTH_SHARING

    def computed(self, plan: Plan) -> None:
        """The pass is done: its tokens are in the cache."""
        for chunk in plan.decodes + plan.prefills:
            self.running[chunk.slot].cached = chunk.end

    def retire(self) -> list[Sequence]:
        """Take finished sequences out; the last slot moves into each gap."""
        done = []
        slot = 0
        while slot < len(self.running):
            sequence = self.running[slot]
            if not sequence.done:
                slot += 1
                continue
            done.append(sequence)
            last = self.running.pop()
            if last is not sequence:
                self.cache.copy(len(self.running), slot, 0, last.cached)
                self.running[slot] = last
        return done

    def cut(self, request_ids: frozenset[str], *, started_only: bool = False) -> list[Sequence]:
        """End these requests where they stand, and return them."""
        waiting = [] if started_only else self._all_waiting()
        for sequence in [*self.running, *waiting]:
            if sequence.request.request_id in request_ids:
                sequence.finish = FinishReason.ABORT
        self.waiting = deque(row for row in self.waiting if not row.done)
        for wave in self.waves.values():
            wave.members = {order: row for order, row in wave.members.items() if not row.done}
        return self.retire() + [row for row in waiting if row.done]

    def cut_all(self) -> list[Sequence]:
        """End every request, and forget waves whose other requests will never come. Touches no cache: it may be broken."""
        ended = [*self.running, *self._all_waiting()]
        for sequence in ended:
            sequence.finish = FinishReason.ABORT
        self.running, self.waiting, self.waves, self.active_wave = [], deque(), {}, None
        return ended

    def _all_waiting(self) -> list[Sequence]:
        return [*self.waiting, *(row for wave in self.waves.values() for row in wave.members.values())]

    def weights_changed(self, from_version: int) -> None:
        """What is cached was computed with older weights from here on."""
        for sequence in self.running:
            sequence.weights_changed(from_version)

    def forget_cache(self) -> None:
        """Every running sequence keeps its slot and its tokens and is prefilled anew."""
        for sequence in self.running:
            sequence.forget_cache()
