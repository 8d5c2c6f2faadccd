"""timeline.json in the trace event format, for https://ui.perfetto.dev and chrome://tracing; whole JSON at every moment.

Each write puts new events over the end of the array and ends it again, in one call. So a killed run leaves a whole file too, whose
last events are what was running: slices that begin ("B") and do not end.
"""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from miles.tracking.intervals import Interval

logger = logging.getLogger(__name__)

Event = dict[str, Any]
Point = tuple[str, float]
"""A row, and a moment within one of its slices: what an arrow goes through."""

_REMEMBERED = 64  # slices of a row that a new one is compared with


class TraceFile:
    """Appends slices and arrows. A row per worker; a slice that would cut through another gets a further row of that worker."""

    def __init__(self, path: Path) -> None:
        self.path = path
        earlier = read(path)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._end = self._length = 0  # where the next event goes; bytes of the file
        self._rows = {event["args"]["name"]: event["tid"] for event in earlier if event.get("name") == "thread_name"}
        self._slices: dict[int, deque[Interval]] = {}
        self._ends: dict[int, float] = {}  # row -> where the last of its slices ends
        self._arrows = max((int(event["id"]) for event in earlier if event.get("ph") in ("s", "t", "f")), default=0)
        self._new: list[Event] = [_cut_off(event, earlier) if event.get("ph") == "B" else event for event in earlier]
        self.write()

    def slice(self, worker: str, name: str, interval: Interval, args: dict[str, Any]) -> None:
        row = self._row(worker, interval)
        self._slices[row].append(interval)
        self._ends[row] = max(self._ends.get(row, 0.0), interval[1])
        start, end = round(interval[0] * 1e6), round(interval[1] * 1e6)
        self._new.append({"name": name, "ph": "X", "pid": 1, "tid": row, "ts": start, "dur": end - start, "args": args})

    def arrow(self, name: str, points: Sequence[Point]) -> None:
        """Through moments of slices that have been written, in this order of rows."""
        self._arrows += 1
        for place, (worker, moment) in enumerate(points):
            kind: Event = {"ph": "s"} if place == 0 else {"ph": "f", "bp": "e"} if place + 1 == len(points) else {"ph": "t"}
            row = self._row_at(worker, moment)
            self._new.append({"name": name, "cat": name, "id": self._arrows, **kind, "pid": 1, "tid": row, "ts": round(moment * 1e6)})

    def write(self, running: Iterable[tuple[str, str, float, dict[str, Any]]] = ()) -> None:
        """Everything new, and what is `running`: worker, name, start, args. A full disk costs the file's rest, not the run."""
        open_slices = [
            {"name": name, "ph": "B", "pid": 1, "tid": self._row(worker, (start, float("inf"))), "ts": round(start * 1e6), "args": args}
            for worker, name, start, args in running
        ]
        if self._file < 0:
            self._new = []
            return
        new = [_text(event) for event in self._new]
        self._new = []
        stays = ("" if self._end or not new else "[\n") + "".join(
            ",\n" * (self._end > 0 or place > 0) + text for place, text in enumerate(new)
        )
        last = ",\n".join(map(_text, open_slices))
        begins = self._end > 0 or bool(new)
        data = stays + ((",\n" if begins else "[\n") + last if last else "" if begins else "[") + "\n]\n"
        padded = data.encode()
        padded += b" " * max(self._length - self._end - len(padded), 0)
        try:
            os.pwrite(self._file, padded, self._end)
        except OSError as error:
            logger.error("%s ends here: %s", self.path, error)
            self.close()
            return
        self._length = self._end + len(padded)
        self._end += len(stays.encode())

    def close(self) -> None:
        """Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _row(self, worker: str, interval: Interval) -> int:
        """The first row of this worker on which the slice lies beside, within or around every other."""
        number = 1
        while True:
            name = worker if number == 1 else f"{worker} ({number})"
            if name not in self._rows:
                self._rows[name] = len(self._rows) + 1
                self._new.append({"name": "thread_name", "ph": "M", "pid": 1, "tid": self._rows[name], "args": {"name": name}})
            row = self._rows[name]
            known = self._slices.setdefault(row, deque(maxlen=_REMEMBERED))
            if interval[0] >= self._ends.get(row, 0.0) or all(_fits(interval, other) for other in known):
                return row
            number += 1

    def _row_at(self, worker: str, moment: float) -> int:
        """The row of this worker that has a slice at this moment."""
        rows = [row for name, row in self._rows.items() if name == worker or name.startswith(f"{worker} (")]
        return next((row for row in rows for low, high in self._slices.get(row, ()) if low <= moment <= high), rows[0])


def _fits(one: Interval, other: Interval) -> bool:
    (a, b), (c, d) = one, other
    return b <= c or d <= a or (a <= c and d <= b) or (c <= a and b <= d)


_text = json.JSONEncoder(default=str).encode


def _cut_off(event: Event, events: Sequence[Event]) -> Event:
    """A slice that was running when an earlier process of this run was killed: it ends with what that process last wrote."""
    seen = max(other["ts"] + other.get("dur", 0) for other in events if "ts" in other)
    return event | {"ph": "X", "dur": max(seen - event["ts"], 1), "args": event.get("args", {}) | {"cut_off": True}}


def read(path: str | Path) -> list[Event]:
    """The events of a timeline file, of a torn one too; [] when there is none."""
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
