"""The folder of a run: made, moved aside, or continued.

runs/NAME/
    config.toml      the effective settings, with origins
    metrics.jsonl    one object a line: rollout_id, step, time, metrics
    ledger.jsonl     what became of every prompt group
    timeline.json    what ran when (Chrome trace)
    summary.json     what bounds the run, and what to change
    end.json         how it ended
    logs/ samples/ checkpoints/
"""

import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from miles.config import toml
from miles.config.checkpoint_files import complete
from miles.config.places import newest_checkpoint
from miles.config.resume import changed
from miles.config.run_config import RunConfig
from miles.config.whole_files import write_whole
from miles.tracking import ledger, waits

logger = logging.getLogger(__name__)

LOCK, WORKERS = ".lock", ".workers"
"""Locked by the run's driver, and by each of its workers."""
_ORPHANS_LIMIT = 30.0
END = "end.json"
"""How the process ended: written last, so a killed one leaves none."""
SUMMARY = "summary.json"
"""What bounds the run."""
_FILES_OF_A_START = {LOCK, WORKERS, END, "config.toml", "trackers.json", "metrics.jsonl", "ledger.jsonl", "timeline.json"}
_FOLDERS_OF_A_START = {"logs", "samples", "checkpoints"}


def prepare(args: RunConfig) -> Path:
    """Make the run's folder and write config.toml.

    A folder of that name with anything in it is moved to NAME.1, NAME.2, ... unless the run resumes from a checkpoint inside it: then
    lines about rollouts that will be done again leave metrics.jsonl and samples/, so that no curve folds back (the ledger is cut by its
    writer, when it goes on). That of a run which ended before it had measured anything gives way, so that false starts do not pile up.

    Raises:
        ValueError: a run of that name is going on, or was killed and its workers have not ended; the folder cannot be made; or --save
            has checkpoints of another run, which this one would replace.
    """
    try:
        return _prepare(args)
    except OSError as error:
        raise ValueError(f"--run-root {args.run_root}: cannot make the run's folder: {error}") from error


def _prepare(args: RunConfig) -> Path:
    folder = Path(args.run_dir)
    if is_locked(folder):
        raise ValueError(f"--name {args.name}: a run of that name is going on in {folder}; give this one another name, or end that one")
    _wait_for_orphans(args, folder)
    _refuse_taken_checkpoints(args)
    if folder.is_dir() and any(folder.iterdir()):
        if args.goes_on or _resumes_inside(args, folder):
            first = args.start_rollout_id
            if first is None:
                newest = newest_checkpoint(Path(str(args.load)).expanduser())
                first = 0 if newest is None else newest + 1
            cut(folder, first)
            if args.goes_on:
                logger.info("the run in %s was not finished: going on from rollout %d (--no-load would start it anew)", folder, first)
                if differ := changed(args, folder):
                    logger.info("going on with other settings: %s", ", ".join(differ))
        elif _is_false_start(folder):
            shutil.rmtree(folder)
        else:
            _move_aside(folder, args)
    for part in ("logs", "samples", "checkpoints"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for told in (folder / END, folder / "logs" / waits.ASKED, *(folder / "logs").glob(f"*{waits.ENDING}*")):  # of the process before
        told.unlink(missing_ok=True)
    write_whole(folder / "config.toml", toml.dump(args))
    return folder


def lock(folder: Path) -> int:
    """Mark the folder as that of a living run; returns the file to close at its end. The mark goes with the process, however that ends.

    Raises:
        ValueError: another process did so since `prepare` looked.
    """
    file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise ValueError(f"--name {folder.name}: another process has just begun or resumed that run in {folder}") from None
    return file


def share(folder: Path) -> None:
    """Mark the folder as one that this worker writes to, as long as its process lives."""
    fcntl.flock(os.open(folder / WORKERS, os.O_RDWR | os.O_CREAT, 0o644), fcntl.LOCK_SH)


def _wait_for_orphans(args: RunConfig, folder: Path) -> None:
    """Workers outlive a killed driver for some seconds, in which they may still write."""
    deadline = time.monotonic() + _ORPHANS_LIMIT
    while is_locked(folder, WORKERS):
        if time.monotonic() > deadline:
            raise ValueError(
                f"--name {args.name}: workers of a run of that name still live {_ORPHANS_LIMIT:g} s after its driver ended (lsof "
                f"{folder / WORKERS} lists them); end them, or give this run another name"
            )
        time.sleep(0.1)


def is_locked(folder: Path, name: str = LOCK) -> bool:
    """Whether a living run has this folder."""
    if not (folder / name).exists():
        return False
    file = os.open(folder / name, os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def _refuse_taken_checkpoints(args: RunConfig) -> None:
    """Those in the run's own folder move aside with it; --save names a place that does not move."""
    if args.save is None or args.goes_on:
        return
    place = Path(args.save).expanduser().resolve()
    if Path(args.run_dir).resolve() in place.parents or (args.load and Path(args.load).expanduser().resolve().is_relative_to(place)):
        return
    if found := complete(place):
        raise ValueError(
            f"--save {args.save}: has checkpoints of an earlier run already (rollout_{max(found):06d} is its newest), which this run "
            f"would replace; go on with them (--load {args.save}), or give this run another place"
        )


def _resumes_inside(args: RunConfig, folder: Path) -> bool:
    return args.load is not None and Path(args.load).expanduser().resolve().is_relative_to(folder.resolve())


def _is_false_start(folder: Path) -> bool:
    """Whether it holds nothing but what every start makes: no metric, no sample, no checkpoint, nothing of the user's."""
    parts = {path.name for path in folder.iterdir()}
    if "config.toml" not in parts or not parts <= _FILES_OF_A_START | _FOLDERS_OF_A_START:
        return False
    metrics = folder / "metrics.jsonl"
    measured = metrics.exists() and metrics.stat().st_size > 0
    return not measured and not any(path for part in ("samples", "checkpoints") for path in (folder / part).glob("*"))


def _move_aside(folder: Path, args: RunConfig) -> None:
    taken = [int(match[1]) for path in folder.parent.glob(f"{folder.name}.*") if (match := re.fullmatch(r".*\.(\d+)", path.name))]
    aside = folder.with_name(f"{folder.name}.{max(taken, default=0) + 1}")
    folder.rename(aside)
    differ = ", ".join(changed(args, aside)[:5]) if (aside / "config.toml").exists() else ""
    why = f"; this one has {differ}" if differ else ""
    text = "an earlier run of this name is now %s%s (miles train-async --resume %s goes on with one that has checkpoints)"
    logger.info(text, aside, why, aside)


def cut(folder: Path, first: int) -> None:
    """Take out what was recorded of rollouts from `first` on, evals at `first` and later included."""
    trackers = Trackers.load(folder)
    trackers.resumed_at = first
    logged = [line["rollout_id"] for line in ledger.read(folder / "metrics.jsonl")]
    trackers.sent_through = max([*logged, trackers.sent_through])
    trackers.save()
    cut_lines(folder / "metrics.jsonl", lambda line: line["rollout_id"] < first)
    for path in (folder / "samples").glob("*"):
        if (match := re.search(r"(\d+)", path.name)) and int(match[1]) >= first:
            path.unlink()


def cut_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Keep the JSON lines of a file that `keep` approves; a torn line, such as a killed process leaves last, goes."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if keep(json.loads(line)):
                kept.append(line + "\n")
        except ValueError:
            logger.warning("%s: a torn line is left out: %.60s", path, line)
    temporary = path.with_suffix(".cut")
    temporary.write_text("".join(kept), encoding="utf-8")
    os.replace(temporary, path)


@dataclass(slots=True)
class Trackers:
    """What trackers must know of a run across resumes; kept in trackers.json."""

    path: Path
    run_id: str
    mlflow_run_id: str | None = None
    sent_through: int = -1  # the last rollout that remote trackers have seen
    resumed_at: int | None = None  # the first rollout of this process, when it resumed

    @classmethod
    def load(cls, folder: Path) -> "Trackers":
        path = folder / "trackers.json"
        if path.exists():
            try:
                return cls(path, **json.loads(path.read_text(encoding="utf-8")))
            except (ValueError, TypeError) as error:
                logger.warning("%s cannot be read (%s): remote trackers get a new run", path, error)
        trackers = cls(path, secrets.token_hex(4))
        trackers.save()
        return trackers

    def save(self) -> None:
        content = {name: value for name, value in asdict(self).items() if name != "path"}
        write_whole(self.path, json.dumps(content) + "\n")
