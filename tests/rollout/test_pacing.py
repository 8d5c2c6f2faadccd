"""The pacing law and the buffer, for any order of events."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.rollout.group_buffer import GroupBuffer
from miles.rollout.pacing import Pacing
from miles.types import PromptGroup, Sample, VersionSpan


def group_of(index: int, version: int) -> PromptGroup:
    sample = Sample(index, index, "", [1], response_ids=[5, 2], version_spans=[VersionSpan(0, 1, version), VersionSpan(1, 2, version + 1)])
    return PromptGroup(index, index, 0, [sample])


def test_deadlines_follow_the_publishes() -> None:
    pacing = Pacing(batch_size=4, interval=2, max_staleness=1, num_rollout=100, next_rollout=0, version=1, anchor_version=1)
    # Rollouts 0, 1 are drained at version 1; 2, 3 at 2; 4, 5 at 3.
    assert pacing.deadline(1) == 3
    assert pacing.deadline(2) == 5
    assert pacing.room(0) == 16
    pacing.next_rollout = 2
    assert pacing.room(8) == 0, "before the publish only rollouts 2 and 3 are left to it"
    pacing.publish(2)
    assert pacing.room(8) == 8
    assert pacing.deadline(1) == 3


def test_nothing_is_started_for_rollouts_after_the_last() -> None:
    pacing = Pacing(batch_size=4, interval=1, max_staleness=9, num_rollout=2, next_rollout=0, version=1, anchor_version=1)
    assert pacing.room(0) == 8
    pacing.next_rollout = 2
    assert pacing.room(0) == 0


def test_a_due_group_is_waited_for_and_slack_is_used() -> None:
    pacing = Pacing(
        batch_size=2, interval=1, max_staleness=1, num_rollout=100, next_rollout=5, version=6, anchor_rollout=5, anchor_version=6
    )
    # v(5) = 6, so groups of version 5 are due now, those of version 6 one rollout later.
    assert pacing.choose([6, 6], running={5: 1}) is None
    assert pacing.choose([6, 6, 5], running={}) == [0, 2]
    assert pacing.choose([6, 6], running={6: 1}) == [0, 1]
    assert pacing.choose([6, 6, 6], running={}) == [0, 1]
    assert pacing.choose([6], running={6: 1}) is None


@dataclass
class Producer:
    """A model of the producer and the driver, moved by a list of random numbers."""

    pacing: Pacing
    buffer: GroupBuffer
    places: int
    draws: int = 0
    flights: dict[int, int] = field(default_factory=dict)
    trained: list[tuple[int, int, int]] = field(default_factory=list)  # group, rollout, lag
    started_waiting: int = 0

    def fill(self, getting: bool) -> None:
        awaited = self.pacing.batch_size if getting else 0
        while (
            len(self.flights) < self.places
            and not self.buffer.is_full(awaited)
            and self.pacing.room(len(self.flights) + len(self.buffer.waiting)) > 0
        ):
            self.flights[self.draws] = self.pacing.version
            self.draws += 1


@settings(max_examples=150, deadline=None)
@given(
    batch=st.integers(1, 5),
    interval=st.integers(1, 4),
    staleness=st.integers(0, 4),
    num_rollout=st.integers(1, 12),
    first=st.integers(0, 5),
    places=st.integers(1, 12),
    factor=st.sampled_from([0.1, 0.5, 1.0, 3.0]),
    seed=st.integers(0, 2**32),
    hurry=st.floats(0, 1),
)
@pytest.mark.case("C55")
def test_for_any_order_of_ends_no_token_is_too_old_and_nothing_is_lost(
    *, batch: int, interval: int, staleness: int, num_rollout: int, first: int, places: int, factor: float, seed: int, hurry: float
) -> None:
    """Publishes on schedule; groups end in any order, whenever. Nothing may become stale, and every rollout is filled."""
    dice = random.Random(seed)
    last = first + num_rollout
    pacing = Pacing(batch, interval, staleness, last, first, version=1)
    run = Producer(pacing, GroupBuffer(max(int(factor * batch), 1)), places)
    for rollout in range(first, last):
        pacing.anchor()
        while True:
            run.fill(getting=True)
            assert not run.buffer.take_stale(pacing)
            taken = run.buffer.take_batch(pacing, Counter(run.flights.values()))
            if taken is not None:
                break
            assert run.flights, "an idle wait: nothing is in flight and the rollout is not filled"
            index = dice.choice(sorted(run.flights))
            run.buffer.put(group_of(index, run.flights.pop(index)), 0)
        run.trained += [(group.group_index, rollout, pacing.version - group.oldest_version) for group in taken]
        pacing.next_rollout += 1
        run.fill(getting=False)
        while run.flights and dice.random() < hurry:  # ends while the trainer works
            index = dice.choice(sorted(run.flights))
            run.buffer.put(group_of(index, run.flights.pop(index)), 0)
            run.fill(getting=False)
            assert len(run.flights) <= places
            assert len(run.buffer.waiting) <= run.buffer.capacity + places
        if (rollout + 1) % interval == 0:
            pacing.publish(pacing.version + 1)
            run.fill(getting=False)
    assert max(lag for _, _, lag in run.trained) <= staleness
    assert sorted(group for group, _, _ in run.trained) == list(range(batch * num_rollout)), "nothing lost, nothing twice, nothing too many"
    assert run.draws == batch * num_rollout
    assert not run.flights
    assert not run.buffer.waiting


@settings(max_examples=80, deadline=None)
@given(
    events=st.lists(st.sampled_from(["end", "publish", "get"]), max_size=80),
    batch=st.integers(1, 4),
    interval=st.integers(1, 3),
    staleness=st.integers(0, 3),
    seed=st.integers(0, 2**32),
)
def test_publishes_off_schedule_never_let_an_old_token_through(
    events: list[str], batch: int, interval: int, staleness: int, seed: int
) -> None:
    """Whatever the driver does: what is drained is fresh enough, every draw is in exactly one place, and it never locks up."""
    dice = random.Random(seed)
    pacing = Pacing(batch, interval, staleness, 1000, 0, version=1)
    pacing.anchor()
    run = Producer(pacing, GroupBuffer(batch), 6)
    stale: deque[int] = deque()
    for event in events:
        run.fill(getting=False)
        if event == "end" and run.flights:
            index = dice.choice(sorted(run.flights))
            run.buffer.put(group_of(index, run.flights.pop(index)), 0)
        elif event == "publish":
            pacing.publish(pacing.version + dice.choice([1, 1, 3]))
        elif event == "get":
            pacing.anchor()
            for _ in range(200):
                stale.extend(entry.group.group_index for entry in run.buffer.take_stale(pacing))
                run.fill(getting=True)
                taken = run.buffer.take_batch(pacing, Counter(run.flights.values()))
                if taken is not None:
                    break
                assert run.flights, "an idle wait"
                index = dice.choice(sorted(run.flights))
                run.buffer.put(group_of(index, run.flights.pop(index)), 0)
            else:
                raise AssertionError("a rollout that is never filled")
            assert all(pacing.version - group.oldest_version <= staleness for group in taken)
            run.trained += [(group.group_index, pacing.next_rollout, 0) for group in taken]
            pacing.next_rollout += 1
    everywhere = [*run.flights, *(entry.group.group_index for entry in run.buffer.waiting), *stale, *(group for group, _, _ in run.trained)]
    assert sorted(everywhere) == list(range(run.draws))
