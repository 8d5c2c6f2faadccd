"""What ran when: spans, their Chrome trace, and how well a step overlapped."""

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

KEPT_SPANS = 256  # in memory, for step_metrics; the file has all


@dataclass(slots=True)
class Span:
    """`worker` did `name` in [start, end), seconds of the wall clock (time.time()); end is None while it runs."""

    worker: str
    name: str
    start: float
    end: float | None = None
    args: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return (time.time() if self.end is None else self.end) - self.start


class Timeline:
    """The spans of a run. Spans named generate, train, publish, eval and save with a `rollout_id` give the perf/* of a step.

    Every finished span is appended to the file at once, so a killed run leaves a trace too: an array without its end,
    which trace viewers accept, as `read` does.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._spans: deque[Span] = deque(maxlen=KEPT_SPANS)
        self._running: dict[int, Span] = {}
        self._lock = threading.Lock()
        self.changed = time.time()  # when a span last began or ended
        self._workers: dict[str, int] = {}
        self._first = True
        self._file = -1
        if self.path is not None:
            earlier = read(self.path)
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            self._workers = {event["args"]["name"]: event["tid"] for event in earlier if event.get("name") == "thread_name"}
            if earlier:
                self._write(earlier)

    @contextmanager
    def span(self, worker: str, name: str, **args: Any) -> Iterator[Span]:
        """Measure a block; it counts as running, and shows in the live view, until it is left."""
        span = Span(worker, name, time.time(), args=args)
        with self._lock:
            self._running[id(span)] = span
            self.changed = span.start
        try:
            yield span
        finally:
            span.end = time.time()
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

    def step_metrics(self, rollout_id: int) -> dict[str, float]:
        """perf/* of one rollout's step, once its train and publish spans have ended; {} when it has no train span.

        A step goes from the end of the last one (the first: from the start of its generation) to the end of its own training or
        publish. overlap_efficiency = (max(generate, train) + publish) / step, all of them without the evals and saves that fell into
        the step, and with the generation that ran within it, whichever rollout it was for: 1 when nothing waits that could overlap.
        """
        with self._lock:
            spans = list(self._spans)
        mine = [span for span in spans if span.args.get("rollout_id") == rollout_id]
        if not any(span.name == "train" for span in mine):
            return {}
        before = [_end(span) for span in spans if span.name in ("train", "publish") and _rollout(span) < rollout_id]
        start = max(before) if before else min(span.start for span in mine)
        end = max(_end(span) for span in mine if span.name in ("train", "publish"))
        stalls = {name: _covered([span for span in spans if span.name == name], start, end) for name in ("eval", "save")}
        took = {name: _covered([span for span in mine if span.name == name]) for name in ("generate", "train", "publish")}
        seconds = took | {name: parts for name, parts in stalls.items() if parts}
        publish = _covered([span for span in mine if span.name == "publish"], start, end)
        active = _without((start, end), sorted(stalls["eval"] + stalls["save"]))
        free = _without((start, end), sorted(stalls["eval"] + stalls["save"] + publish))
        beside = [
            sum(_total(_covered([span for span in among if span.name == name], low, high)) for low, high in free)
            for name, among in (("generate", spans if before else mine), ("train", mine))
        ]
        efficiency = (max(beside) + _total(active) - _total(free)) / _total(active) if active else 1.0
        metrics = {f"perf/{name}_seconds": _total(parts) for name, parts in seconds.items()}
        return {"perf/step_seconds": end - start, **metrics, "perf/overlap_efficiency": efficiency}

    def close(self) -> None:
        """End the file's array. Idempotent."""
        with self._lock:
            if self._file >= 0:
                self._append(("[" if self._first else "") + "\n]\n")
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def _note(self, span: Span) -> None:
        with self._lock:
            self.changed = time.time()
            self._spans.append(span)
            events: list[dict[str, Any]] = []
            if span.worker not in self._workers:
                number = self._workers[span.worker] = len(self._workers) + 1
                events.append({"name": "thread_name", "ph": "M", "pid": 1, "tid": number, "args": {"name": span.worker}})
            event = {"name": span.name, "ph": "X", "pid": 1, "tid": self._workers[span.worker]}
            times = {"ts": round(span.start * 1e6), "dur": round(span.seconds * 1e6)}
            self._write([*events, event | times | {"args": span.args}])

    def _write(self, events: list[dict[str, Any]]) -> None:
        """Append events in one write; the array's beginning comes with the first."""
        if self._file >= 0:
            text = ",\n".join(json.dumps(event, default=str) for event in events)
            self._append(("[\n" if self._first else ",\n") + text)
            self._first = False

    def _append(self, text: str) -> None:
        """A full disk costs the file's rest, not the run."""
        try:
            os.write(self._file, text.encode())
        except OSError as error:
            logger.error("%s ends here: %s", self.path, error)
            os.close(self._file)
            self._file = -1


def _end(span: Span) -> float:
    assert span.end is not None
    return span.end


def _rollout(span: Span) -> int:
    return int(span.args.get("rollout_id", -1))


def _covered(spans: list[Span], start: float = float("-inf"), end: float = float("inf")) -> list[tuple[float, float]]:
    """The parts of [start, end) that at least one span covers, in order, none touching another twice."""
    parts: list[tuple[float, float]] = []
    reached = start
    for span in sorted(spans, key=lambda span: span.start):
        low, high = max(span.start, reached), min(_end(span), end)
        if high > low:
            parts.append((low, high))
            reached = high
    return parts


def _without(whole: tuple[float, float], holes: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """What is left of an interval."""
    low, end = whole
    parts = []
    for start, stop in holes:
        if start > low:
            parts.append((low, start))
        low = max(low, stop)
    return [*parts, (low, end)] if end > low else parts


def _total(parts: list[tuple[float, float]]) -> float:
    return sum(high - low for low, high in parts)


def read(path: str | Path) -> list[dict[str, Any]]:
    """The events of a timeline file, of an unfinished one too; [] when there is none."""
    path = Path(path)
    if not path.exists():
        return []
    events = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        text = line.strip().rstrip(",")
        if text.startswith("{"):
            try:
                events.append(json.loads(text))
            except ValueError:
                continue
    return events
