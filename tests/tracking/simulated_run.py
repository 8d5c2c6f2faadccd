"""Runs of known parameters, played without a clock: what their timeline would hold."""

from dataclasses import dataclass, field

from miles.tracking.critical_path import Arrival, Span
from miles.types import GroupTimes


@dataclass
class Simulated:
    """Seconds of each thing: `write` is a batch with one engine, `score` one reward; `eval` comes every `eval_every` rollouts."""

    write: float
    train: float
    score: float = 0.0
    pack: float = 0.0
    publish: float = 0.0
    eval: float = 0.0
    eval_every: int = 1
    engines: int = 1
    batch: int = 4
    spans: list[Span] = field(default_factory=list)
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    now: float = 1000.0

    def add(self, name: str, start: float, seconds: float, rollout: int) -> float:
        worker = {"generate": "executor", "eval": "executor"}.get(name, "actor")
        self.spans.append(Span(worker, name, start, start + seconds, {"rollout_id": rollout}))
        return start + seconds

    def get(self, start: float, rollout: int) -> float:
        """A batch as a wave: its groups end one after another."""
        write = self.write / self.engines
        groups = [
            GroupTimes(start, start + write * (place + 1) / self.batch, start + write * (place + 1) / self.batch + self.score, 0)
            for place in range(self.batch)
        ]
        ready = start + write + self.score
        self.arrivals[rollout] = Arrival(groups, ready)
        return self.add("generate", start, ready + self.pack - start, rollout)

    def after(self, rollout: int, now: float) -> float:
        """Publish and evaluation."""
        now = self.add("publish", now, self.publish, rollout) if self.publish else now
        return self.add("eval", now, self.eval, rollout) if self.eval and (rollout + 1) % self.eval_every == 0 else now

    def plain(self, steps: int) -> float:
        """Plays plain asynchronous steps. Returns the mean seconds of those that are not the first."""
        came, begun = self.get(self.now, 0), 0.0
        for rollout in range(steps):
            began = came if rollout == 0 else max(came, self.now)
            begun = begun or began
            came = self.get(began, rollout + 1)
            self.now = self.after(rollout, max(self.add("train", began, self.train, rollout), came))
        return (self.now - begun) / steps

    def in_turn(self, steps: int) -> float:
        start = self.now
        for rollout in range(steps):
            came = self.get(self.now, rollout)
            self.now = self.after(rollout, self.add("train", came, self.train, rollout))
        return (self.now - start) / steps

    def fully(self, steps: int, places: int, ahead: int) -> float:
        """Plays a producer that keeps `places` groups in flight and at most `ahead` undrained; they share the engines' time."""
        each = self.write / self.engines * places / self.batch
        flying = [self.now + each * (place + 1) / places for place in range(min(places, ahead))]  # when written
        waiting: list[GroupTimes] = []
        first = 0.0
        for rollout in range(steps + 4):
            get_from, ready = self.now, self.now
            while len(waiting) < self.batch:
                written = flying.pop(0)
                waiting.append(GroupTimes(written - each, written, written + self.score, 0))
                ready = max(ready, written + self.score)
                if len(flying) + len(waiting) < ahead:
                    flying.append(written + self.score + each)
            batch, waiting = waiting[: self.batch], waiting[self.batch :]
            self.arrivals[rollout] = Arrival(batch, ready)
            self.now = self.add("generate", get_from, ready + self.pack - get_from, rollout)
            while len(flying) < places and len(flying) + len(waiting) < ahead:
                flying.append(max(self.now, flying[-1] + each / places if flying else self.now) + each)
            flying.sort()
            first = first or (self.now if rollout == 4 else 0.0)
            began, self.now = self.now, self.add("train", self.now, self.train, rollout)
            flying = [moment + self.publish if moment > began + self.train else moment for moment in flying]
            self.now = self.after(rollout, self.now)
        return (self.now - first) / steps
