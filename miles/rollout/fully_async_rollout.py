"""The producer that never stops: groups are kept in flight across rollouts and publishes, as far as pacing allows."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import floor

from miles.config.run_config import RunConfig
from miles.rollout.carried import Carried, going_on
from miles.rollout.context import RolloutContext, used_up
from miles.rollout.freshness import mask_older, oldest_trained
from miles.rollout.group import OpenSeat, cut_off, renewed, run_group
from miles.rollout.group_buffer import Finished, GroupBuffer
from miles.rollout.pacing import Pacing
from miles.rollout.state import FunctionState
from miles.rollout.verdicts import TIMING, GroupFailed
from miles.types import PromptGroup, RolloutOutput

logger = logging.getLogger(__name__)

BUNCHES = 4
"""In so many bunches a batch is started, at most."""
FLYING_BUNCHES = 2
"""While as many are in flight, fewer groups than a bunch are not started yet."""


@dataclass(slots=True)
class Flight:
    """A group in flight. Its place is given back when it ends, or when the full buffer has room for it."""

    group: PromptGroup
    version: int  # the executor's when its first token may have been written: none can be older
    carried: list[Carried] = field(init=False)

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


class FullyAsyncRollout:
    """Consumes draws, keeps groups in flight, produces a batch whenever one is asked for and ready.

    There is no loop: `fill` starts what may be started, after every event that can make room (a group ended, a batch was
    taken, a publish, a get). A fault in any group ends the pending or the next get at once, with that fault.
    """

    def __init__(self, args: RunConfig, context: RolloutContext):
        self.args = args
        self.context = context
        self.places = args.max_concurrent_groups or max(context.num_engines * args.engine_max_running // args.n_samples_per_prompt, 1)
        self.buffer = GroupBuffer(capacity=max(floor(args.buffer_factor * args.rollout_batch_size), 1))
        self.flights: dict[int, Flight] = {}  # group index -> flight
        self.started: Counter[int] = Counter()  # version -> flights of it
        self.tasks: set[asyncio.Task[None]] = set()
        self.pacing: Pacing | None = None  # from the first get on
        self.drained: dict[int, list[int]] = {}  # rollout id -> its group indices
        self.failure: BaseException | None = None
        self.no_more_data = False
        self.closed = False
        self.getting = False
        self.event = asyncio.Event()
        self.seat = OpenSeat(context.router)

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
        """Start as many groups as there are places, buffer and pacing for."""
        pacing = self.pacing
        if pacing is None or self.closed or self.failure is not None:
            return
        for _ in range(self._startable(pacing)):
            group = self.context.data.take()
            self.no_more_data = group is None
            if group is None:
                break
            self.context.ledger.note("taken", group.group_index, prompt=group.prompt_index, epoch=group.epoch, attempt=group.attempt)
            self.flights[group.group_index] = Flight(group, pacing.version)
            self.started[pacing.version] += 1
            task = asyncio.ensure_future(self._fly(group.group_index))
            self.tasks.add(task)
            task.add_done_callback(self._landed)

    def _startable(self, pacing: Pacing) -> int:
        """Groups that may be started now. A few wait for more, while many others are in flight: engines answer short requests much
        faster when they come together."""
        waiting, flying, awaited = len(self.buffer.waiting), len(self.flights), pacing.batch_size if self.getting else 0
        room = min(
            self.places - flying - self.buffer.overflow(awaited),
            pacing.room(flying + waiting),
            self.places if waiting < self.buffer.capacity + awaited else 0,
        )
        bunch = min(pacing.batch_size, self.places) // BUNCHES
        return 0 if room < bunch and flying >= FLYING_BUNCHES * bunch else room

    async def _fly(self, index: int) -> None:
        """One draw, with its retries, until it is in the buffer, refused, or given up."""
        context, flight = self.context, self.flights[index]
        verdicts = context.verdicts
        while True:
            group = flight.group
            try:
                await run_group(context, group, [self.seat] * len(group.samples), "t", flight.carried)
            except GroupFailed as failure:
                if not verdicts.retries(group, failure, flight.kept if failure.kind in TIMING else 0):
                    break
                assert self.pacing is not None
                self._count_out(flight)
                flight.go_on(failure, self.pacing.version)
                self.started[flight.version] += 1
                continue
            context.data.note_scored(group)
            if verdicts.passes(group):
                self.buffer.put(group, flight.version)
            break
        self._count_out(self.flights.pop(index))

    def _count_out(self, flight: Flight) -> None:
        self.started[flight.version] -= 1
        if not self.started[flight.version]:
            del self.started[flight.version]

    def _landed(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled():
            self.failure = self.failure or task.exception()
        try:
            self.fill()
        except Exception as error:  # a callback has no caller: the get raises it
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
            "places": self.places,
            "next_rollout": self.pacing.next_rollout if self.pacing else None,
            "pacing_room": self.pacing.room(len(self.flights) + len(self.buffer.waiting)) if self.pacing else None,
        }

    async def dispose(self) -> None:
        self.closed = True
        await cut_off(list(self.tasks))
        self.flights.clear()
        self.started.clear()
        self.buffer.waiting.clear()
