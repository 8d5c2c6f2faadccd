"""What each step had to wait for: the chain of work, one thing after another, that ended with its training.

The step of rollout r is looked at from the beginning of the training before it to the beginning of its own; so the parts of
all steps add up to the time of the run. The chain is followed backwards: what ended last before the training began, what
had ended last before that began, and so on. Where it reaches the rollout, it follows the group that was scored last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles.tracking.intervals import Interval, total, union, without
from miles.types import GroupTimes

PARTS = ("generation", "reward", "queue", "data", "training", "publish", "eval", "save", "other")
"""
generation   an engine wrote something that the batch waited for
reward       the last answer was being scored
queue        nothing that the batch waited for was going on: no engine was live, or pacing held groups back
data         the batch was packed, cut into shares and stored
other        the driver itself
"""
_PART_OF = {"train": "training", "publish": "publish", "eval": "eval", "save": "save"}
_TOUCHING = 1e-6  # seconds by which one may seem to begin before the other has ended


@dataclass(slots=True)
class Span:
    """`worker` did `name` in [start, end), seconds since 1970 (clock.py); end is infinite while it runs."""

    worker: str
    name: str
    start: float
    end: float = float("inf")
    args: dict[str, Any] = field(default_factory=dict)
    rollout_id: int = field(init=False)  # -1: of none

    def __post_init__(self) -> None:
        self.rollout_id = int(self.args.get("rollout_id", -1))

    @property
    def background(self) -> bool:
        """Whether nobody waits for it."""
        return bool(self.args.get("background"))


@dataclass(slots=True)
class Arrival:
    """A batch as it came from the rollout side: its groups' times, and when the last of them was there."""

    groups: Sequence[GroupTimes]
    ready: float

    @property
    def last(self) -> GroupTimes | None:
        return max(self.groups, key=lambda group: group.scored, default=None)


def critical_path(spans: Sequence[Span], arrivals: Mapping[int, Arrival], rollout_id: int) -> dict[str, float]:
    """Seconds of each part of PARTS in the step of `rollout_id`; {} when it has not been trained, or its batch is not known.

    Args:
        spans: those of the run, named generate, train, publish, eval and save.
        arrivals: the batches, by rollout.
    """
    own = [span for span in spans if span.name == "train" and span.rollout_id == rollout_id]
    before = [span for span in spans if span.name == "train" and span.rollout_id == rollout_id - 1]
    get = next((span for span in spans if span.name == "generate" and span.rollout_id == rollout_id), None)
    if not own or get is None or rollout_id not in arrivals:
        return {}
    now = min(span.start for span in own)
    low = min((span.start for span in before), default=get.start)
    work = [get, *(span for span in spans if span.name in _PART_OF and not span.background and low < span.end <= now + _TOUCHING)]
    parts: dict[str, float] = defaultdict(float)
    while now > low + _TOUCHING:
        ended = [span for span in work if span.end <= now + _TOUCHING and span.start < now]
        if not ended:
            parts["other"] += now - low
            break
        last = max(ended, key=lambda span: (span.end, -span.start))
        parts["other"] += max(now - last.end, 0.0)
        if last is get:
            now = _through_rollout(get, arrivals, _publishes(spans), (low, min(now, last.end)), parts)
        else:
            now, end = max(last.start, low), min(now, last.end)
            parts[_PART_OF[last.name]] += end - now
    return {part: parts[part] for part in PARTS}


def rollout_parts(get: Span, arrivals: Mapping[int, Arrival]) -> dict[str, float]:
    """Seconds of generation, reward, queue and data in which one batch came, from when it was asked for."""
    parts: dict[str, float] = defaultdict(float)
    _through_rollout(get, arrivals, [], (get.start, get.end), parts)
    return {part: parts[part] for part in PARTS}


def _through_rollout(
    get: Span, arrivals: Mapping[int, Arrival], publishes: Sequence[Interval], whole: Interval, parts: dict[str, float]
) -> float:
    """Attribute the time that a batch took, from `whole[1]` back. Returns where the chain goes on."""
    low, now = whole
    asked, groups, last = (
        max(get.start, low),
        [group for batch in arrivals.values() for group in batch.groups],
        arrivals[get.rollout_id].last,
    )
    ready = min(max(arrivals[get.rollout_id].ready, asked), now)
    parts["data"] += now - ready
    if last is None or last.scored <= asked:  # all was there when it was asked for
        parts["queue"] += ready - asked
        return asked
    if not any(group.started < get.start < group.scored for group in groups):
        low = asked  # nothing of it had begun
    scored, generated, started = (min(max(mark, low), ready) for mark in (last.scored, last.generated, last.started))
    parts["queue"] += ready - scored
    parts["reward"] += scored - generated
    paused = union(publishes, low, generated)
    busy = union([(group.started, group.generated) for group in groups] + [(started, generated)], low, generated)
    writing = without(busy, paused)
    parts["generation"] += total(writing)
    parts["publish"] += total(paused)
    parts["queue"] += max(generated - low - total(writing) - total(paused), 0.0)
    return low


def _publishes(spans: Sequence[Span]) -> list[Interval]:
    return [(span.start, span.end) for span in spans if span.name == "publish"]
