"""What ran when: spans, their trace file, and how well a step overlapped."""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from miles.tracking.clock import now
from miles.tracking.critical_path import Arrival, Span, critical_path
from miles.tracking.intervals import Interval, total, union, without
from miles.tracking.trace_file import TraceFile

KEPT_SPANS = 64  # in memory, for step_metrics; the file has all
KEPT_ARRIVALS = 16  # batches whose groups' times are remembered
MOST_ARROWS = 16  # groups of a batch that get an arrow, spread over it


class Timeline:
    """The spans of a run. Spans named generate, train, publish, eval and save with a `rollout_id` give the perf/* of a step.

    Its file has one row per worker. The rows of engines and of the reward are drawn from the times that groups bring along, and
    arrows go with groups and publishes from row to row.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self._file = None if path is None else TraceFile(Path(path))
        self._spans: deque[Span] = deque(maxlen=KEPT_SPANS)
        self._running: dict[int, Span] = {}
        self._arrivals: dict[int, Arrival] = {}
        self._untrained: set[int] = set()  # batches whose arrows have not been drawn
        self._drawn: dict[str, deque[Interval]] = {}
        self._lock = threading.Lock()
        self.changed = now()  # when a span last began or ended

    @contextmanager
    def span(self, worker: str, name: str, **args: Any) -> Iterator[Span]:
        """Measure a block; it counts as running, and shows in the live view, until it is left."""
        span = Span(worker, name, now(), args=args)
        with self._lock:
            self._running[id(span)] = span
            self.changed = span.start
            self._write()
        try:
            yield span
        finally:
            span.end = now()
            with self._lock:
                self._running.pop(id(span), None)
            self._note(span)

    def add(self, worker: str, name: str, start: float, end: float, **args: Any) -> None:
        """Note a span that was measured elsewhere, such as in a worker."""
        self._note(Span(worker, name, start, end, args))

    def running(self) -> list[Span]:
        """Spans that have not ended, oldest first: what the run is waiting for."""
        with self._lock:
            return sorted(self._running.values(), key=lambda span: span.start)

    def arrived(self, rollout_id: int, arrival: Arrival) -> None:
        """A batch came, and its span generate has ended: draw what engines and reward did for it."""
        groups = [group for group in arrival.groups if group.scored]
        with self._lock:
            self._arrivals[rollout_id] = Arrival(groups, arrival.ready)
            self._untrained.add(rollout_id)
            for old in sorted(self._arrivals)[:-KEPT_ARRIVALS]:
                del self._arrivals[old]
                self._untrained.discard(old)
            for worker in sorted({_engine(group.engine) for group in groups}):
                mine = [(group.started, group.generated) for group in groups if _engine(group.engine) == worker]
                self._draw(worker, "generate", mine, rollout_id)
            self._draw("reward", "score", [(group.generated, group.scored) for group in groups], rollout_id)
            self._write()

    def published(self, span: Span, engines: Sequence[str]) -> None:
        """A publish has ended: draw it at the engines that it went to."""
        with self._lock:
            if self._file is not None:
                for engine in engines:
                    self._file.slice(engine, "load weights", (span.start, span.end), span.args)
                    self._drawn.setdefault(engine, deque(maxlen=KEPT_SPANS)).append((span.start, span.end))
                    self._file.arrow("publish", [(span.worker, span.start), (engine, (span.start + span.end) / 2)])
                self._write()

    def recent(self) -> tuple[list[Span], dict[int, Arrival]]:
        """The last spans that have ended, and the last batches."""
        with self._lock:
            return list(self._spans), dict(self._arrivals)

    def step_metrics(self, rollout_id: int) -> dict[str, float]:
        """perf/* of one rollout's step, once its train and publish spans have ended; {} when it has no train span.

        A step goes from the end of the last one (the first: from the start of its generation) to the end of its own training or
        publish. overlap_efficiency = (max(generate, train) + publish) / step, all of them without the evals and saves that fell into
        the step, and with the generation that ran within it, whichever rollout it was for: 1 when nothing waits that could overlap.
        perf/critical_path/*: see critical_path.py.
        """
        spans, arrivals = self.recent()
        mine = [span for span in spans if span.rollout_id == rollout_id]
        if not any(span.name == "train" for span in mine):
            return {}
        before = [span.end for span in spans if span.name in ("train", "publish") and span.rollout_id < rollout_id]
        start = max(before) if before else min(span.start for span in mine)
        end = max(span.end for span in mine if span.name in ("train", "publish"))
        stalls = {name: _covered([s for s in spans if s.name == name and not s.background], start, end) for name in ("eval", "save")}
        took = {name: _covered([span for span in mine if span.name == name]) for name in ("generate", "train", "publish")}
        seconds = took | {name: parts for name, parts in stalls.items() if parts}
        publish = _covered([span for span in mine if span.name == "publish"], start, end)
        stalled = union(stalls["eval"] + stalls["save"])
        active = without([(start, end)], stalled)
        free = without(active, publish)
        beside = [
            sum(total(_covered([span for span in among if span.name == name], low, high)) for low, high in free)
            for name, among in (("generate", spans if before else mine), ("train", mine))
        ]
        efficiency = (max(beside) + total(active) - total(free)) / total(active) if active else 1.0
        metrics = {f"perf/{name}_seconds": total(parts) for name, parts in seconds.items()}
        path = {f"perf/critical_path/{part}_seconds": value for part, value in critical_path(spans, arrivals, rollout_id).items()}
        return {"perf/step_seconds": end - start, **metrics, "perf/overlap_efficiency": efficiency, **path}

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if self._file is not None:
                self._write()
                self._file.close()

    def _note(self, span: Span) -> None:
        with self._lock:
            self.changed = now()
            self._spans.append(span)
            if self._file is None:
                return
            self._file.slice(span.worker, span.name, (span.start, span.end), span.args)
            if span.name == "train" and span.rollout_id in self._untrained:
                self._untrained.discard(span.rollout_id)
                self._draw_arrows(span)
            self._write()

    def _write(self) -> None:
        if self._file is not None:
            running = sorted(self._running.values(), key=lambda span: span.start)
            self._file.write((span.worker, span.name, span.start, span.args) for span in running)

    def _draw(self, worker: str, name: str, intervals: list[Interval], rollout_id: int) -> None:
        """The parts that have not been drawn for an earlier batch."""
        if self._file is not None:
            drawn = self._drawn.setdefault(worker, deque(maxlen=KEPT_SPANS))
            for part in without(union(intervals), union(drawn)):
                self._file.slice(worker, name, part, {"rollout_id": rollout_id})
                drawn.append(part)

    def _draw_arrows(self, train: Span) -> None:
        """From where each group was begun, by way of its last answer and its batch, to its training."""
        assert self._file is not None
        get = next((s for s in reversed(self._spans) if s.name == "generate" and s.rollout_id == train.rollout_id), None)
        groups = self._arrivals[train.rollout_id].groups
        for place in range(0, len(groups), -(-len(groups) // MOST_ARROWS) or 1):
            group = groups[place]
            points = [(_engine(group.engine), group.started)]
            points += [("reward", group.generated)] if group.scored > group.generated else []
            points += [(get.worker, min(max(group.scored, get.start), get.end))] if get is not None else []
            self._file.arrow("group", [*points, (train.worker, train.start)])


def _engine(index: int) -> str:
    return f"engine-{index}" if index >= 0 else "engines"


def _covered(spans: Sequence[Span], start: float = float("-inf"), end: float = float("inf")) -> list[Interval]:
    """The parts of [start, end) that at least one span covers."""
    return union(((span.start, span.end) for span in spans), start, end)
