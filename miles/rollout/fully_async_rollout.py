"""The producer that never stops: groups are kept in flight across rollouts and publishes, as far as pacing allows."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import floor

from miles.config.run_config import RunConfig
from miles.rollout.carried import Carried, going_on, is_open
from miles.rollout.context import RequestRouter, RolloutContext, used_up
from miles.rollout.freshness import mask_older, oldest_trained
from miles.rollout.group import OpenSeat, cut_off, renewed, run_group
from miles.rollout.group_buffer import Finished, GroupBuffer
from miles.rollout.pacing import Pacing
from miles.rollout.state import FunctionState
from miles.rollout.verdicts import TIMING, GroupFailed
from miles.types import PromptGroup, RolloutOutput

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Flight:
    """A group in flight."""

    group: PromptGroup
    version: int  # the executor's when its first token may have been written: none can be older
    carried: list[Carried] = field(init=False)
    writing: int = 0  # samples that engines are asked for

    def __post_init__(self) -> None:
        self.carried = [Carried() for _ in self.group.samples]

    @property
    def kept(self) -> int:
        """Tokens that the next attempt goes on with."""
        return sum(one.tokens for one in self.carried)

    def go_on(self, failure: GroupFailed, version: int) -> None:
        """The next attempt: what depends on the machine alone does not cost what is written; a bad answer does."""
        if failure.kind in TIMING and self.kept:
            self.group = going_on(self.group, failure.done)
        else:
            self.group, self.version = renewed(self.group), version
            self.carried = [Carried() for _ in self.group.samples]


class FlightSeat(OpenSeat):
    """A sample of a flight gives its slot in the engines back as soon as it is written, while its siblings are at theirs."""

    __slots__ = ("written",)

    def __init__(self, router: RequestRouter, written: Callable[[], None]):
        super().__init__(router)
        self.written = written

    def leave(self) -> None:
        self.written()


class FullyAsyncRollout:
    """Consumes draws, keeps groups in flight, produces a batch whenever one is asked for and ready.

    There is no loop: `fill` starts what may be started, after every event that can make room (a sample was written, a group
    ended, a batch was taken, a publish, a get). A fault in any group ends the pending or the next get at once, with that fault.
    """

    def __init__(self, args: RunConfig, context: RolloutContext):
        self.args = args
        self.context = context
        self.slots = max(context.num_engines * args.engine_max_running, args.n_samples_per_prompt)
        self.buffer = GroupBuffer(capacity=max(floor(args.buffer_factor * args.rollout_batch_size), 1))
        self.flights: dict[int, Flight] = {}  # group index -> flight
        self.started: Counter[int] = Counter()  # version -> flights of it
        self.writing = 0  # samples of flights that engines are asked for
        self.tasks: set[asyncio.Task[None]] = set()
        self.pacing: Pacing | None = None  # from the first get on
        self.drained: dict[int, list[int]] = {}  # rollout id -> its group indices
        self.failure: BaseException | None = None
        self.no_more_data = False
        self.closed = False
        self.getting = False
        self.event = asyncio.Event()

    async def __call__(self, rollout_id: int) -> RolloutOutput:
        assert not self.getting, "one rollout at a time"
        pacing = self._begin(rollout_id)
        self.getting = True
        try:
            while True:
                self.event.clear()
                if self.failure is not None:
                    raise self.failure
                self._refuse_stale(pacing)
                batch = self.buffer.take_batch(pacing, self._awaited())
                if batch is not None:
                    break
                self.fill()
                if self.no_more_data and not self.flights:
                    raise used_up(self.context, rollout_id, len(self.buffer.waiting))
                await self.event.wait()
        finally:
            self.getting = False
        return self._drained(rollout_id, batch, pacing)

    def _awaited(self) -> Mapping[int, int]:
        """Start version -> groups in flight that a rollout waits for when it is the last that may train them."""
        return {} if self.args.staleness_policy == "keep" else self.started

    def set_weight_version(self, version: int) -> None:
        if self.pacing is not None:
            self.pacing.publish(version)
            self._refuse_stale(self.pacing)  # first, so that what is started again comes before new draws
            self.fill()
            self.event.set()

    def untrained(self, trained_through: int) -> Sequence[int]:
        """Drained for later rollouts, waiting, or in flight."""
        for rollout_id in [done for done in self.drained if done <= trained_through]:
            del self.drained[rollout_id]
        waiting = [entry.group.group_index for entry in self.buffer.waiting]
        return sorted([*(index for indices in self.drained.values() for index in indices), *waiting, *self.flights])

    waits = False

    def idle(self) -> bool:
        return not self.flights

    async def quiet(self) -> None:
        """Groups go on across a publish; each token has its version."""

    def state(self) -> FunctionState:
        """Finished groups stay; those in flight are started again."""
        groups = [entry.group for entry in self.buffer.waiting]
        versions = [entry.version for entry in self.buffer.waiting]
        return FunctionState({"versions": versions, "verdicts": self.context.verdicts.state()}, groups, sorted(self.flights))

    def load_state(self, state: FunctionState) -> None:
        self.buffer.waiting = [Finished(*entry) for entry in zip(state.groups, state.values["versions"], strict=True)]
        self.context.verdicts.load_state(state.values["verdicts"])

    def fill(self) -> None:
        """Start as many groups as there are slots, buffer and pacing for."""
        pacing = self.pacing
        if pacing is None or self.closed or self.failure is not None:
            return
        for _ in range(self._startable(pacing)):
            group = self.context.data.take()
            self.no_more_data = group is None
            if group is None:
                break
            self.context.ledger.note("taken", group.group_index, prompt=group.prompt_index, epoch=group.epoch, attempt=group.attempt)
            flight = self.flights[group.group_index] = Flight(group, pacing.version)
            self._count_in(flight)
            task = asyncio.ensure_future(self._fly(group.group_index))
            self.tasks.add(task)
            task.add_done_callback(self._landed)

    def _startable(self, pacing: Pacing) -> int:
        """Groups that may be started now."""
        args, flying = self.args, len(self.flights)
        if self.buffer.is_full(pacing.batch_size if self.getting else 0):
            return 0
        if args.max_concurrent_groups is not None:
            places = args.max_concurrent_groups - flying
        else:
            places = (self.slots - self.writing) // args.n_samples_per_prompt
        return min(places, pacing.room(flying + len(self.buffer.waiting)))

    async def _fly(self, index: int) -> None:
        """One draw, with its retries, until it is in the buffer, refused, or given up."""
        context, flight = self.context, self.flights[index]
        verdicts = context.verdicts
        seat = FlightSeat(context.router, partial(self._written, flight))
        while True:
            group = flight.group
            try:
                await run_group(context, group, [seat] * len(group.samples), "t", flight.carried)
            except GroupFailed as failure:
                if not verdicts.retries(group, failure, flight.kept if failure.kind in TIMING else 0):
                    break
                assert self.pacing is not None
                self._count_out(flight)
                flight.go_on(failure, self.pacing.version)
                self._count_in(flight)
                continue
            context.data.note_scored(group)
            if verdicts.passes(group):
                self.buffer.put(group, flight.version)
            break
        self._count_out(self.flights.pop(index))

    def _count_in(self, flight: Flight) -> None:
        self.started[flight.version] += 1
        flight.writing = sum(map(is_open, flight.group.samples))
        self.writing += flight.writing

    def _count_out(self, flight: Flight) -> None:
        self.writing -= flight.writing  # of siblings that were cut off before they began
        self.started[flight.version] -= 1
        if not self.started[flight.version]:
            del self.started[flight.version]

    def _written(self, flight: Flight) -> None:
        flight.writing -= 1
        self.writing -= 1
        self._room_made()

    def _landed(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled():
            self.failure = self.failure or task.exception()
        self._room_made()
        self.event.set()

    def _room_made(self) -> None:
        try:
            self.fill()
        except Exception as error:  # nobody here has asked for it: the get raises it
            self.failure = self.failure or error
            self.event.set()

    def _begin(self, rollout_id: int) -> Pacing:
        if self.pacing is None:
            args = self.args
            self.pacing = Pacing(
                batch_size=args.rollout_batch_size,
                interval=args.update_weights_interval,
                max_staleness=args.max_weight_staleness,
                num_rollout=self.context.num_rollout,
                next_rollout=rollout_id,
                version=self.context.weight_version,
            )
        assert rollout_id == self.pacing.next_rollout, f"rollout {rollout_id} asked for, {self.pacing.next_rollout} is next"
        self.pacing.anchor()
        self.context.ledger.expect({"in flight": len(self.flights), "finished": len(self.buffer.waiting)})
        return self.pacing

    def _refuse_stale(self, pacing: Pacing) -> None:
        """Publishes came off schedule, or nobody waited for a straggler: what is too old by now is started again, dropped or trimmed."""
        trimmed = []
        for group, version in self.buffer.take_stale(pacing):
            lag = pacing.version - version
            if self.args.staleness_policy == "keep":
                masked = sum(mask_older(sample, pacing.version - pacing.max_staleness) for sample in group.samples)
                oldest = oldest_trained(group)
                if oldest is not None:
                    self.context.verdicts.trimmed(group, lag, masked, oldest)
                    trimmed.append(Finished(group, oldest))
                    continue
            if self.context.verdicts.too_old(group, lag):
                self.context.data.give_back(group)
        if trimmed:
            self.buffer.put_first(trimmed)

    def _drained(self, rollout_id: int, batch: list[PromptGroup], pacing: Pacing) -> RolloutOutput:
        batch.sort(key=lambda group: group.group_index)
        if self.args.mask_offpolicy_in_partial_rollout:
            for sample in (sample for group in batch for sample in group.samples):
                mask_older(sample, sample.newest_version)
        self.drained[rollout_id] = [group.group_index for group in batch]
        pacing.next_rollout += 1
        metrics = self.context.verdicts.settle() | {
            "rollout/groups_waiting": float(len(self.buffer.waiting)),
            "rollout/groups_in_flight": float(len(self.flights)),
        }
        self.fill()
        return RolloutOutput(batch, metrics)

    def stats(self) -> dict[str, object]:
        return {
            "groups_in_flight": sorted(self.flights),
            "groups_waiting": len(self.buffer.waiting),
            "buffer_capacity": self.buffer.capacity,
            "samples_writing": self.writing,
            "slots": self.slots,
            "next_rollout": self.pacing.next_rollout if self.pacing else None,
            "pacing_room": self.pacing.room(len(self.flights) + len(self.buffer.waiting)) if self.pacing else None,
        }

    async def dispose(self) -> None:
        self.closed = True
        await cut_off(list(self.tasks))
        self.flights.clear()
        self.started.clear()
        self.writing = 0
        self.buffer.waiting.clear()
