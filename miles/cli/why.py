"""miles why RUN: why is it slow, stuck, or dead?"""

from __future__ import annotations

import json
import time
import tomllib
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from miles.cli import runs
from miles.config import metrics_file
from miles.config.checkpoint_files import complete
from miles.tracking import ledger, run_folder, trace_file, waits
from miles.tracking.waits import DRIVER, Beat

STACKS_PATIENCE = 8.0
FIRST_TO_GO = 5.0  # seconds by which a worker fell silent before the driver did
LAST_LINES = 15


def main(argv: Sequence[str]) -> int:
    parser = runs.parser("why", "Why a run is slow, stuck or dead: what bounds it, who waits for whom, how it ended.")
    parser.add_argument("--stacks", action="store_true", help="of a living run, also the stacks of those that the others wait for")
    options = parser.parse_args(argv)
    lives = run_folder.is_locked(options.run)
    print("\n".join([*_progress(options.run, lives), *(_of_living(options.run, options.stacks) if lives else _of_dead(options.run))]))
    bound = _json(options.run / run_folder.SUMMARY).get("bound")
    print(f"\nspeed: {bound}" if bound else "\nspeed: too few steps to say what bounds it")
    return 0


def _progress(run: Path, lives: bool) -> list[str]:
    lines = metrics_file.read(run)
    trained = [line for line in lines if any(name.startswith("train/") for name in line)]
    settings = tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))
    total = settings.get("rollout", {}).get("num_rollout")
    done = f"{max(line['rollout_id'] for line in trained) + 1} rollouts" if trained else "no rollout"
    of = f" of {total}" if total else ""
    ago = f", the last {_ago(time.time() - trained[-1]['time'])} ago" if trained else ""
    return [f"{run}: {'lives' if lives else 'is over'}; {done}{of} trained{ago}"]


def _of_living(run: Path, with_stacks: bool) -> list[str]:
    beats = waits.read(run / "logs")
    if not beats:
        return ["its processes have not told anything yet"]
    now = time.time()
    found = waits.chain(beats, now)
    lines = ["", found.sentence, *(f"  {line}" for line in found.lines)]
    lines += [f"  {name}: {state}" for name, beat in beats.items() if (state := waits.process_state(beat, now))]
    if with_stacks:
        stacks = waits.ask_for_stacks(run / "logs", found.ends, STACKS_PATIENCE)
        held_up = waits.held_up_by(stacks)
        lines += ["", *([held_up] if held_up else [])]
        lines += [stacks.get(name) or f"{name} did not tell its stacks" for name in found.ends]
    return lines


def _of_dead(run: Path) -> list[str]:
    end = _json(run / run_folder.END)
    beats = waits.read(run / "logs")
    if end and end["error"] is None:
        return ["it came to its end"]
    when = end["time"] if end else max((beat.time for beat in beats.values()), default=0.0)
    lines = ["", _reason(end, beats)]
    if beats:
        lines += ["", "what each process was doing last:"]
        lines += [f"  {line}" for line in waits.chain(beats, when, judge=False).lines]
    begun = [event for event in trace_file.read(run / "timeline.json") if event.get("ph") == "B"]
    lines += [f"  unfinished: {event['name']} {event.get('args') or ''} for {when - event['ts'] / 1e6:.0f} s" for event in begun]
    driver = beats.get(DRIVER)
    first = [beat for beat in beats.values() if driver is not None and driver.time - beat.time > FIRST_TO_GO]
    for beat in sorted(first, key=lambda beat: beat.time):
        lines += [f"{beat.name} fell silent {driver.time - beat.time:.0f} s before the driver did; the last lines of its log:"]  # type: ignore[union-attr]
        lines += _last_lines(run / "logs" / f"{beat.name}.log")
    open_groups = ledger.balance(ledger.read(run / "ledger.jsonl")).open
    lines += [f"{len(open_groups)} prompt groups were in flight or waiting"] if open_groups else []
    return [*lines, _how_to_go_on(run)]


def _reason(end: dict[str, Any], beats: dict[str, Beat]) -> str:
    if end:
        return f"it ended {_ago(time.time() - end['time'])} ago with {end['error']}: {end['text']}"
    driver = beats.get(DRIVER)
    if driver is None:
        return "its driver ended without a word, before its workers were up"
    last = f"its last sign of life was {_ago(time.time() - driver.time)} ago"
    return f"its driver (pid {driver.pid} on {driver.host}) ended without a word: killed, out of memory, or the machine stopped; {last}"


def _how_to_go_on(run: Path) -> str:
    newest = max(complete(run / "checkpoints"), default=None)
    if newest is None:
        return "there is no complete checkpoint in its folder"
    return f"the newest complete checkpoint is that of rollout {newest}: go on with miles train-async --resume {run}"


def _last_lines(path: Path) -> list[str]:
    if not path.exists():
        return ["  (no log here)"]
    with path.open(errors="replace") as file:
        return [f"  {line.rstrip()}" for line in deque(file, LAST_LINES)] or ["  (empty)"]


def _json(path: Path) -> dict[str, Any]:
    """{} when there is none, or a torn one."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def _ago(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
