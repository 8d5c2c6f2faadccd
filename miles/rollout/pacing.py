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

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice


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

    def choose(self, finished: Sequence[int], running: Mapping[int, int]) -> list[int] | None:
        """Which finished groups the next rollout takes.

        Args:
            finished: oldest version of each finished group, earliest finished first; none of them stale.
            running: version -> groups in flight that were started under it.

        Returns:
            Places in `finished`, ascending, batch_size of them; None while groups it needs are not finished.
        """
        if len(finished) < self.batch_size:
            return None
        due = {version: self.deadline(version) for version in {*finished, *running}}
        have, undrained = Counter[int](), Counter[int]()
        for version, count in Counter(finished).items():
            have[due[version]] += count
            undrained[due[version]] += count
        for version, count in running.items():
            if due[version] >= self.next_rollout:
                undrained[due[version]] += count
        must: dict[int, int] = {}  # deadline -> how many of this and earlier deadlines must be taken now
        ended = left = most = 0
        for deadline in sorted(undrained):
            ended, left = ended + have[deadline], left + undrained[deadline]
            most = must[deadline] = max(most, min(left - self.batch_size * (deadline - self.next_rollout), self.batch_size))
            if ended < most:
                return None
        return self._earliest([due[version] for version in finished], must)

    def _earliest(self, deadlines: Sequence[int], must: Mapping[int, int]) -> list[int]:
        """The earliest finished that leave every class of deadlines as few as `must` asks for; the rest in order."""
        chosen: list[int] = []
        taken = [False] * len(deadlines)
        for due, least in [*must.items(), (max(must), self.batch_size)]:
            if len(chosen) >= least:
                continue
            own = (place for place, deadline in enumerate(deadlines) if deadline <= due and not taken[place])
            for place in list(islice(own, least - len(chosen))):
                taken[place] = True
                chosen.append(place)
        return sorted(chosen)
