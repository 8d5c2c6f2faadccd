"""Where finished groups of the fully asynchronous producer wait to be trained."""

from __future__ import annotations

from collections.abc import Mapping
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

    Holds `capacity` groups: when it is full, the producer starts nothing. A group that finishes then still comes in, so that a
    rollout that waits for just that group gets it. While a rollout is waited for, what it will take does not count.
    """

    capacity: int
    waiting: list[Finished] = field(default_factory=list)
    _oldest: int = -1  # no version in it is older; saves a look at all of them after every event

    def put(self, group: PromptGroup, started_version: int) -> None:
        """`started_version` stands in where a group holds no token at all."""
        oldest = group.oldest_version
        version = oldest if oldest >= 0 else started_version
        self.waiting.append(Finished(group, version))
        self._oldest = min(self._oldest, version)

    def put_first(self, entries: list[Finished]) -> None:
        """Those go out before all others."""
        self.waiting[:0] = entries
        self._oldest = -1

    def is_full(self, awaited: int) -> bool:
        """`awaited`: groups that a waiting get will take."""
        return len(self.waiting) >= self.capacity + awaited

    def take_stale(self, pacing: Pacing) -> list[Finished]:
        """Remove and return the groups whose oldest token lags more than max_staleness behind the current version."""
        oldest_allowed = pacing.version - pacing.max_staleness
        if self._oldest >= oldest_allowed:
            return []
        stale = [entry for entry in self.waiting if entry.version < oldest_allowed]
        if stale:
            self.waiting = [entry for entry in self.waiting if entry.version >= oldest_allowed]
        self._oldest = min((entry.version for entry in self.waiting), default=pacing.version)
        return stale

    def take_batch(self, pacing: Pacing, running: Mapping[int, int]) -> list[PromptGroup] | None:
        """Remove and return the groups of the next rollout, or None while it must wait (see pacing).

        `running`: version -> groups in flight that were started under it.
        """
        if len(self.waiting) < pacing.batch_size:
            return None
        places = pacing.choose([entry.version for entry in self.waiting], running)
        if places is None:
            return None
        chosen = set(places)
        batch = [self.waiting[place].group for place in places]
        self.waiting = [entry for place, entry in enumerate(self.waiting) if place not in chosen]
        return batch
