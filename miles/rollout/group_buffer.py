"""Where finished groups of the fully asynchronous producer wait to be trained."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from miles.rollout.pacing import Pacing
from miles.types import PromptGroup


class Finished(NamedTuple):
    group: PromptGroup
    version: int  # of its oldest token


@dataclass(slots=True)
class GroupBuffer:
    """Finished groups in the order in which they finished. Refused and failed ones never come in.

    Holds `capacity` groups. A group that finishes when it is full still comes in, but keeps its place among those in flight
    until there is room: so a full buffer blocks the producer, and never a rollout that waits for just that group. While a
    rollout is waited for, what it will take does not count against the capacity.
    """

    capacity: int
    waiting: list[Finished] = field(default_factory=list)

    def put(self, group: PromptGroup, started_version: int) -> None:
        """`started_version` stands in where a group holds no token at all."""
        oldest = group.oldest_version
        self.waiting.append(Finished(group, oldest if oldest >= 0 else started_version))

    def overflow(self, awaited: int) -> int:
        """Groups beyond the capacity, which still hold their places in flight. `awaited`: what a waiting get will take."""
        return max(len(self.waiting) - self.capacity - awaited, 0)

    def take_stale(self, pacing: Pacing) -> list[Finished]:
        """Remove and return the groups whose oldest token lags more than max_staleness behind the current version."""
        oldest_allowed = pacing.version - pacing.max_staleness
        stale = [entry for entry in self.waiting if entry.version < oldest_allowed]
        if stale:
            self.waiting = [entry for entry in self.waiting if entry.version >= oldest_allowed]
        return stale

    def take_batch(self, pacing: Pacing, running: Iterable[int]) -> list[PromptGroup] | None:
        """Remove and return the groups of the next rollout, or None while it must wait (see pacing).

        `running`: the version under which each group in flight was started.
        """
        if len(self.waiting) < pacing.batch_size:
            return None
        places = pacing.choose([entry.version for entry in self.waiting], list(running))
        if places is None:
            return None
        chosen = set(places)
        batch = [self.waiting[place].group for place in places]
        self.waiting = [entry for place, entry in enumerate(self.waiting) if place not in chosen]
        return batch
