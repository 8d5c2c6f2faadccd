"""What became of every prompt group: an append-only file of JSON lines that any process may write to.

A draw of the data source is `taken`, and then exactly one of these ends it:

    trained     in `rollout_id`, by optimizer step `step`
    filtered    refused by the group filter (`reason`)
    dropped     failed, too old, or poisonous, and not started again (`reason`)
    returned    given back to the data source; the same group_index is taken again, with a higher `attempt`
    abandoned   in flight or waiting when the run ended

Other events (finished, drained, ...) tell more and end nothing. So at any time: taken = ended + open.
"""

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TAKEN = "taken"
ENDS = ("trained", "filtered", "dropped", "returned", "abandoned")


class Ledger:
    """Appends to one ledger file; every note is a single write, so several processes may share it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o644)

    def note(self, event: str, group_index: int, **fields: Any) -> None:
        """Append one line: {"event", "group_index", "time", ...fields}."""
        self.note_all(event, (group_index,), **fields)

    def note_all(self, event: str, group_indices: Iterable[int], **fields: Any) -> None:
        """Append one line for each group, in one write."""
        now = round(time.time(), 3)
        lines = [{"event": event, "group_index": group_index, "time": now, **fields} for group_index in group_indices]
        os.write(self._file, "".join(json.dumps(line, default=str) + "\n" for line in lines).encode())

    def close(self) -> None:
        """Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read(path: str | Path) -> Iterator[dict[str, Any]]:
    """The lines of a ledger, oldest first; a torn last line is left out. No file reads as no lines."""
    if not Path(path).exists():
        return
    with open(path, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except ValueError:
                continue


@dataclass(slots=True)
class Balance:
    """taken = sum of ended + open, when `faults` is empty."""

    taken: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)  # "dropped: stale" -> count
    open: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return not self.faults and self.taken == sum(self.ended.values()) + len(self.open)


def balance(lines: Iterable[dict[str, Any]]) -> Balance:
    """Count a ledger up, and say which groups ended twice, ended untaken, or were trained twice."""
    found = Balance()
    state: dict[int, int] = defaultdict(int)  # group_index -> takes not yet ended
    trained: Counter[int] = Counter()
    for line in lines:
        event, group = line["event"], line["group_index"]
        if event == TAKEN:
            found.taken += 1
            state[group] += 1
            if state[group] > 1:
                found.faults.append(f"group {group} was taken again before its first take ended")
        elif event in ENDS:
            found.ended[event] += 1
            if line.get("reason"):
                found.reasons[f"{event}: {line['reason']}"] += 1
            state[group] -= 1
            if state[group] < 0:
                found.faults.append(f"group {group} ended ({event}) without having been taken")
            trained[group] += event == "trained"
    found.faults += [f"group {group} was trained {count} times" for group, count in trained.items() if count > 1]
    found.open = sorted(group for group, takes in state.items() if takes > 0)
    return found


def rewind(path: str | Path, first_rollout: int, done_again: Collection[int] | None = None) -> None:
    """Take out of a ledger what a resumed run does again.

    Args:
        path: the ledger.
        first_rollout: the first rollout that is done again.
        done_again: groups that the data source will give out again. Not given: every group but those trained before
            `first_rollout`, and those that ended otherwise and are older than the last of them.
    """
    lines = list(read(path))
    if not lines:
        return
    trained = {line["group_index"] for line in lines if line["event"] == "trained" and line["rollout_id"] < first_rollout}
    if done_again is None:
        last = max(trained, default=-1)
        ended = {line["group_index"] for line in lines if line["event"] in ("filtered", "dropped") and line["group_index"] < last}
        kept = trained | ended
    else:
        kept = {line["group_index"] for line in lines} - set(done_again)
    temporary = Path(path).with_suffix(".cut")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in lines if line["group_index"] in kept), encoding="utf-8")
    os.replace(temporary, path)
