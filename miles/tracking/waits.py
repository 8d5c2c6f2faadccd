"""Who waits for whom: what each process of a run last said of itself, and the chain that follows from it.

Every process writes logs/NAME.alive.json every few seconds: its running calls, and the calls that it waits for. The files outlive
their processes, so that a killed run can be asked as well.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

DRIVER = "driver"
ENDING = ".alive.json"
KEPT = ".kept"
ASKED = "stacks.asked"
"""A file in logs/ whose touch asks every process for its stacks."""
SILENT = 10.0
"""Seconds without a sign after which a process is looked at."""
_MOST = 6


@dataclass(slots=True)
class Call:
    """`worker` is asked to do `method`, since a moment of the wall clock."""

    worker: str
    method: str
    since: float


@dataclass(slots=True)
class Beat:
    """What a process said of itself at `time`."""

    name: str
    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)
    time: float = field(default_factory=time.time)
    calls: list[Call] = field(default_factory=list)  # that it was asked for, and has not answered
    waits: list[Call] = field(default_factory=list)  # that it asked others for
    notes: list[str] = field(default_factory=list)  # what else it waits for, in words
    stacks: str = ""  # when asked


def write(folder: Path, beat: Beat) -> None:
    """All or nothing. Raises OSError."""
    path = folder / f"{beat.name}{ENDING}"
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(asdict(beat)), encoding="utf-8")
    os.replace(temporary, path)


def read(folder: Path) -> dict[str, Beat]:
    """The last beat of every process, by name; of a run that ended by itself, the last before its end."""
    found = {}
    for path in sorted(folder.glob(f"*{ENDING}{KEPT}")) or sorted(folder.glob(f"*{ENDING}")):
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        for name in ("calls", "waits"):
            fields[name] = [Call(**call) for call in fields[name]]
        found[fields["name"]] = Beat(**fields)
    return found


def keep(folder: Path) -> None:
    """Lay the beats of this moment, the end of the run, aside: from here on everybody is being ended."""
    for path in folder.glob(f"*{ENDING}"):
        path.with_name(path.name + KEPT).write_bytes(path.read_bytes())


@dataclass(slots=True)
class Chain:
    """Who waits for whom, as lines; the chain in one sentence; and the workers at its ends, whose stacks one wants."""

    lines: list[str]
    sentence: str
    ends: list[str]


def chain(beats: Mapping[str, Beat], now: float, start: str = DRIVER, judge: bool = True) -> Chain:
    """Follow the waits from `start`, the oldest first. `judge`: say what state a silent process is in now."""
    lines: list[str] = []
    ends: list[str] = []
    told: set[str] = set()

    def tell(name: str, depth: int) -> None:
        told.add(name)
        beat = beats.get(name)
        edges = _edges(beat)
        for (worker, method), calls in edges[:_MOST]:
            age = now - min(call.since for call in calls)
            many = f" ({len(calls)} calls, the oldest)" if len(calls) > 1 else ""
            lines.append(f"{'  ' * depth}{name} waits {age:.0f} s{many} for {worker}: {method}")
            if worker in told:
                lines[-1] += " (see above)"
            else:
                tell(worker, depth + 1)
        if len(edges) > _MOST:
            lines.append(f"{'  ' * depth}{name} waits for {len(edges) - _MOST} more")
        lines.extend(f"{'  ' * depth}{name} waits for {note}" for note in (beat.notes if beat else ()))
        if not edges:
            ends.append(name)
            lines.append(f"{'  ' * depth}{name}: {_doing(beat, now, judge)}")

    tell(start, 0)
    return Chain(lines, _sentence(beats, now, start), ends)


def _edges(beat: Beat | None) -> list[tuple[tuple[str, str], list[Call]]]:
    """The waits of a process, by whom and what for, the oldest first."""
    groups: dict[tuple[str, str], list[Call]] = defaultdict(list)
    for call in beat.waits if beat else ():
        groups[call.worker, call.method].append(call)
    return sorted(groups.items(), key=lambda item: min(call.since for call in item[1]))


def _doing(beat: Beat | None, now: float, judge: bool) -> str:
    if beat is None:
        return "nothing is known of it"
    calls = sorted(beat.calls, key=lambda call: call.since)
    names = list(dict.fromkeys(call.method for call in calls))
    busy = f"busy with {', '.join(names)} for {now - calls[0].since:.0f} s" if calls else "has nothing to do"
    silence = process_state(beat, now) if judge else ""
    return busy + (f"; {silence}" if silence else "")


def _sentence(beats: Mapping[str, Beat], now: float, start: str) -> str:
    """The chain along the oldest waits: the one that explains the rest."""
    text, name, seen = start, start, {start}
    while edges := _edges(beats.get(name)):
        (worker, method), calls = edges[0]
        text += f"{' waits' if name == start else ', which waits'} for {worker} ({method}, {now - min(c.since for c in calls):.0f} s)"
        if worker in seen:
            return f"{text}: a circle"
        seen.add(worker)
        name = worker
    beat = beats.get(name)
    notes = f", which waits for {beat.notes[0]}" if beat is not None and beat.notes else ""
    silence = process_state(beat, now) if beat is not None else "nothing is known of it"
    return text + notes + (f": {silence}" if silence else "")


def process_state(beat: Beat, now: float) -> str:
    """Why a process may be silent; "" when it is not."""
    silent = now - beat.time
    if silent < SILENT:
        return ""
    said = f"no sign of life for {silent:.0f} s"
    if beat.host != socket.gethostname():
        return f"{said} (pid {beat.pid} on {beat.host})"
    try:
        status = psutil.Process(beat.pid).status()
    except psutil.NoSuchProcess:
        return f"{said}: its process {beat.pid} is gone"
    if status == psutil.STATUS_STOPPED:
        return f"{said}: its process {beat.pid} is stopped (SIGSTOP); kill -CONT {beat.pid} lets it go on"
    return f"{said}: its process {beat.pid} is {status}"


def collective(stacks: str) -> str:
    """The collective that a worker's compute thread stands in, by its stacks; "" when in none."""
    name = ""
    inside = False
    for line in stacks.splitlines():
        if line.startswith("thread "):
            inside = " compute" in line
        elif inside and "torch/distributed/" in line and ", in " in line:
            name = line.rsplit(", in ", 1)[1].strip()
    return name


def held_up_by(stacks: Mapping[str, str]) -> str:
    """Which of several workers the others wait for in a collective; "" when that cannot be told."""
    waiting = {name: where for name, text in stacks.items() if (where := collective(text))}
    others = [name for name in stacks if name not in waiting]
    if not waiting or not others:
        return ""
    table = ", ".join(f"{name} in {where}" for name, where in waiting.items())
    return f"in a collective, waiting for the others: {table}; not in it: {', '.join(others)}"


def ask_for_stacks(folder: Path, names: Sequence[str], patience: float) -> dict[str, str]:
    """The stacks of these processes of a living run; of those that answer within `patience` seconds."""
    asked = time.time()
    (folder / ASKED).touch()
    deadline = time.monotonic() + patience
    found: dict[str, str] = {}
    while len(found) < len(names) and time.monotonic() < deadline:
        time.sleep(0.1)
        found |= {name: beat.stacks for name, beat in read(folder).items() if name in names and beat.stacks and beat.time >= asked}
    return found
