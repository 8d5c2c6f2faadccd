"""What became of every prompt group: an append-only file of JSON lines, and books that must balance at every moment.

A draw of the data source is `taken`, and then exactly one of these ends it:

    trained     in `rollout_id`, by optimizer step `step`
    filtered    refused by the group filter (`reason`)
    dropped     failed, too old, or poisonous, and not started again (`reason`)
    returned    given back to the data source; the same group_index is taken again
    abandoned   in flight or waiting when the run ended

Until then it is in flight, finished or drained. Other events (retried, ...) tell more and end nothing. So at any time:
taken = ended + in flight + finished + drained, and no group is trained twice. A note is written before what it tells of
has an effect; one that the books forbid ends the run.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TAKEN = "taken"
ENDS = ("trained", "filtered", "dropped", "returned", "abandoned")
STAGES = {TAKEN: "in flight", "finished": "finished", "drained": "drained"}
"""Event -> where an open group is from then on."""


_text = json.JSONEncoder(default=str).encode


class LedgerError(RuntimeError):
    """A group would be lost or used twice: a fault of the producer, with the numbers."""


@dataclass(slots=True)
class Books:
    """taken = sum of ended + open, when `faults` is empty. Memory is that of the open groups and the reasons."""

    taken: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)  # "dropped: stale" -> count
    retried: int = 0
    stage: dict[int, str] = field(default_factory=dict)  # open group -> where it is
    faults: list[str] = field(default_factory=list)
    _trained: set[int] = field(default_factory=set)  # of those from _trained_below on
    _trained_below: int = 0

    def add(self, line: dict[str, Any]) -> None:
        """One event of one group. What cannot be is noted in `faults`."""
        event, group = line["event"], line["group_index"]
        if event == TAKEN:
            self.taken += 1
            if group in self.stage:
                self.faults.append(f"group {group} was taken again before its first take ended")
            self.stage[group] = STAGES[event]
        elif event in STAGES:
            if group not in self.stage:
                self.faults.append(f"group {group} is {event} without having been taken")
            self.stage[group] = STAGES[event]
        elif event in ENDS:
            self.ended[event] += 1
            if line.get("reason"):
                self.reasons[f"{event}: {line['reason']}"] += 1
            if self.stage.pop(group, None) is None:
                self.faults.append(f"group {group} ended ({event}) without having been taken")
            if event == "trained":
                self._note_trained(group)
        elif event == "retried":
            self.retried += 1

    def _note_trained(self, group: int) -> None:
        if group < self._trained_below or group in self._trained:
            self.faults.append(f"group {group} was trained twice")
        self._trained.add(group)
        while self._trained_below in self._trained:
            self._trained.remove(self._trained_below)
            self._trained_below += 1

    @property
    def open(self) -> list[int]:
        return sorted(self.stage)

    @property
    def holds(self) -> bool:
        return not self.faults and self.taken == self.ended.total() + len(self.stage)

    def __str__(self) -> str:
        """The sum, in one line."""
        counts = Counter(self.stage.values())
        parts = [f"{self.ended[end]} {end}" for end in ENDS] + [f"{counts[stage]} {stage}" for stage in STAGES.values()]
        return f"{self.taken} taken = " + " + ".join(parts)


class Ledger:
    """Appends to one ledger file, which has one writer; every note is a single write."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.books = Books()  # of what this process noted, and after `rewind` of the whole file
        self.next_number = 0  # of the next line
        self._file = os.open(self.path, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o644)

    def note(self, event: str, group_index: int, **fields: Any) -> None:
        """Append one line: {"event", "group_index", "number", "time", ...fields}. Raises LedgerError when the books forbid it."""
        self.note_all(event, (group_index,), **fields)

    def note_all(self, event: str, group_indices: Iterable[int], **fields: Any) -> None:
        """Append one line for each group, in one write."""
        now = round(time.time(), 3)
        lines = [
            {"event": event, "group_index": group_index, "number": number, "time": now, **fields}
            for number, group_index in enumerate(group_indices, self.next_number)
        ]
        self.next_number += len(lines)
        self._write("".join(_text(line) + "\n" for line in lines).encode())
        known = len(self.books.faults)
        for line in lines:
            self.books.add(line)
        if len(self.books.faults) > known:
            raise LedgerError(f"{self.path}: {'; '.join(self.books.faults[known:])} ({self.books})")

    def _write(self, data: bytes) -> None:
        try:
            while data:  # a disk with little room takes a part, and refuses the rest
                data = data[os.write(self._file, data) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def expect(self, where: dict[str, int]) -> None:
        """Compare with what the producer itself holds. Raises LedgerError with both where they differ.

        Args:
            where: stage -> number of open groups there; a stage that is left out is not compared.
        """
        counts = Counter(self.books.stage.values())
        if wrong := [f"{number} {stage}" for stage, number in where.items() if counts[stage] != number]:
            raise LedgerError(f"{self.path}: the producer has {', '.join(wrong)}, the books say {self.books}")

    def sync(self) -> None:
        """Returns when every note is on the disk itself."""
        os.fsync(self._file)

    def rewind(self, next_number: int, last_rollout: int, trained: int | None = None) -> None:
        """Back to where a checkpoint was taken: what was written later goes, and so does what it tells of later rollouts.

        By numbers and not by bytes, as a run may be killed again before its next checkpoint, and rewound from a file that was cut already.

        Args:
            next_number: `next_number` as it was then.
            last_rollout: of the checkpoint; drains and trainings of later ones are done again.
            trained: groups that were trained by then. A ledger that is empty begins anew: it is lost, or that of a new run.

        Raises:
            ValueError: a line is damaged or missing, or what is left does not balance.
        """
        if numbers := damaged(self.path):
            raise ValueError(f"{self.path}, line {numbers[0]}: damaged, so nobody knows what was trained; put the file back as it was")
        kept = [line for line in read(self.path) if line["number"] < next_number and not _is_later(line, last_rollout)]
        books = balance(kept)
        if books.faults:
            raise ValueError(f"{self.path} is not whole: {'; '.join(books.faults[:3])}; put the file back as it was")
        if kept and trained is not None and books.ended["trained"] != trained:
            raise ValueError(
                f"{self.path} is not whole: it tells of {books.ended['trained']} trained groups, the checkpoint of {trained}; put the file "
                "back as it was, or take it away: then the books begin anew"
            )
        temporary = self.path.with_suffix(".cut")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(temporary, self.path)
        os.close(self._file)
        self._file = os.open(self.path, os.O_APPEND | os.O_WRONLY)
        self.books, self.next_number = books, next_number

    def close(self) -> None:
        """Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _is_later(line: dict[str, Any], last_rollout: int) -> bool:
    return line["event"] in ("drained", "trained") and line["rollout_id"] > last_rollout


def read(path: str | Path) -> Iterator[dict[str, Any]]:
    """The lines of a ledger, oldest first; a torn or damaged one is left out. No file reads as no lines."""
    return (line for line in _parsed(path) if line is not None)


def damaged(path: str | Path) -> list[int]:
    """The numbers, from 1, of the lines that cannot be read. The last may be torn, by a kill."""
    lines = list(_parsed(path))
    return [number for number, line in enumerate(lines[:-1], 1) if line is None]


def _parsed(path: str | Path) -> Iterator[dict[str, Any] | None]:
    if not Path(path).exists():
        return
    with open(path, encoding="utf-8", errors="replace") as lines:
        for text in lines:
            try:
                line = json.loads(text)
            except ValueError:
                line = None
            yield line if isinstance(line, dict) else None


def balance(lines: Iterable[dict[str, Any]]) -> Books:
    """Count a ledger up, and say which groups ended twice, ended untaken, or were trained twice."""
    books = Books()
    for line in lines:
        books.add(line)
    return books


def histories(lines: Iterable[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Group -> its events in order, without times and numbers: what two runs that are the same have in common.

    The order of different groups' lines is that of what was faster, the training of one rollout or the generation of the next.
    """
    found: dict[int, list[dict[str, Any]]] = {}
    for line in lines:
        found.setdefault(line["group_index"], []).append({name: value for name, value in line.items() if name not in ("time", "number")})
    return dict(sorted(found.items()))
