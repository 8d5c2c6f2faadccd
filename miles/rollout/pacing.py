"""How far the fully asynchronous producer may run ahead, so that nothing it starts gets too old to be trained.

Let B groups make a rollout, k rollouts lie between two publishes, and S be the staleness allowed. A rollout drained at
version v was preceded by an anchor: the last moment at which both were known, version `a` when rollout `q` was next. Publishes
come before rollouts whose id is a multiple of k, so rollout r >= q will be drained at version

    v(r) = a + floor(r / k) - floor(q / k).

A group started under version w holds no token older than w (versions only grow), so it may be trained in rollout r as long
as v(r) <= w + S. The last such rollout is its deadline

    d(w) = k (w + S - a + floor(q / k) + 1) - 1,     and never after the run's last rollout.

Starting: a group may be started under the current version w only while fewer than B (d(w) + 1 - q) groups are started and
undrained, q being the next rollout to be drained. So all undrained groups fit into the rollouts up to the newest deadline, and by
induction the undrained groups of every older deadline d fit into the rollouts up to d:  U(d) <= B (d + 1 - q).

Draining: rollout q takes any B finished groups, earliest finished first, that leave U(d) <= B (d - q) for every d. That is
possible whenever the groups it must take have finished; those it waits for. Hence with publishes on schedule no group ever
becomes stale: nothing is generated in vain, and long answers are not thrown away more often than short ones. Groups can
only become stale when publishes come off schedule; the staleness filter then applies.

With S = 0 this is synchronous generation, with S = 1 the plain lag of one rollout, and the producer stops by itself after
the run's last rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Pacing:
    batch_size: int  # B
    interval: int  # k
    max_staleness: int  # S
    num_rollout: int
    next_rollout: int  # q: the next to be drained
    version: int = 0
    anchor_rollout: int = 0
    anchor_version: int = 0

    def publish(self, version: int) -> None:
        """A new version is what the next rollout will be drained at."""
        assert version >= self.version, f"weight version {version} after {self.version}"
        self.version = version
        self.anchor()

    def anchor(self) -> None:
        self.anchor_rollout, self.anchor_version = self.next_rollout, self.version

    def deadline(self, version: int) -> int:
        """The last rollout that may train tokens of `version`. Below next_rollout: it is too late."""
        epochs = version + self.max_staleness - self.anchor_version + self.anchor_rollout // self.interval
        return min(self.interval * (epochs + 1), self.num_rollout) - 1

    def room(self, undrained: int) -> int:
        """Groups that may be started now."""
        return self.batch_size * (self.deadline(self.version) + 1 - self.next_rollout) - undrained

    def choose(self, finished: Sequence[int], running: Sequence[int]) -> list[int] | None:
        """Which finished groups the next rollout takes.

        Args:
            finished: oldest version of each finished group, earliest finished first; none of them stale.
            running: version under which each group in flight was started.

        Returns:
            Places in `finished`, ascending, batch_size of them; None while groups it needs are not finished.
        """
        if len(finished) < self.batch_size:
            return None
        deadlines = [self.deadline(version) for version in finished]
        undrained = sorted([*deadlines, *(late for version in running if (late := self.deadline(version)) >= self.next_rollout)])
        chosen: list[int] = []
        taken = [False] * len(finished)
        for position, due in enumerate(undrained):
            if position + 1 < len(undrained) and undrained[position + 1] == due:
                continue  # count whole classes of one deadline
            must = min(position + 1 - self.batch_size * (due - self.next_rollout), self.batch_size)
            have = sum(deadlines[place] <= due for place in chosen)
            candidates = [place for place, deadline in enumerate(deadlines) if deadline <= due and not taken[place]] if must > have else []
            if len(candidates) < must - have:
                return None
            for place in candidates[: max(must - have, 0)]:
                taken[place] = True
                chosen.append(place)
        rest = [place for place in range(len(finished)) if not taken[place]]
        return sorted(chosen + rest[: self.batch_size - len(chosen)])
