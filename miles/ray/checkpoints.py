"""Checkpoints as a whole: where each part goes, when one is complete, and which are kept.

    <checkpoint_dir>/latest                  name of the newest complete one; moves last
    <checkpoint_dir>/best                    name of the best one, with --keep-best-metric
    <checkpoint_dir>/scores.json             that metric, by rollout
    <checkpoint_dir>/rollout_000003/actor/   critic/  executor.json  hf/  COMPLETE

A checkpoint grows in .rollout_000003.saving and gets its name when every part is on disk and COMPLETE, with the checksums of all files,
lies in it. So what has that name is whole, also while the same rollout is saved again, and whatever kills the run.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from miles.config.checkpoint_files import COMPLETE, FileSums, complete, damage, sums
from miles.config.places import newest_checkpoint

logger = logging.getLogger(__name__)

SAVING, OLD = "saving", "old"


class Checkpoints:
    """The book of what is saved. `parts` are all that a complete checkpoint has.

    Args:
        keep: how many of the newest stay; None: all.
        best: the metric of whose best value the checkpoint stays too; with a minus before it, less is better.
    """

    def __init__(self, directory: str, keep: int | None = None, best: str | None = None) -> None:
        self.directory = Path(directory).expanduser().absolute()
        self.keep = keep
        self.parts: Collection[str] = ("actor", "executor")
        self.reached: Callable[[str, int], None] = lambda point, rollout_id: None
        self.tell: Callable[[int, str], None] = lambda rollout_id, text: logger.info("%s", text)
        self.last_complete: int | None = None
        self._best = best
        self._written: dict[int, set[str]] = {}
        self._files: dict[int, dict[str, Mapping[str, int | str]]] = {}
        self._scores = _read_scores(self.directory / "scores.json") if best else {}
        _mend(self.directory)

    def folder(self, rollout_id: int) -> Path:
        return self.directory / f"rollout_{rollout_id:06d}"

    def begin(self, rollout_id: int) -> str:
        """Called before a part is written. Returns the folder to write into."""
        growing = self._growing(rollout_id)
        if rollout_id not in self._written:
            self._written[rollout_id], self._files[rollout_id] = set(), {}
            shutil.rmtree(growing, ignore_errors=True)
            growing.mkdir(parents=True, exist_ok=True)
        return str(growing)

    def written(self, rollout_id: int, part: str, files: FileSums | None = None) -> bool:
        """A part is on disk. Completes the checkpoint if it was the last; returns whether it did.

        Args:
            files: the checksums of its files, by their place in the checkpoint. None: they are few, and read now.
        """
        growing, done = self._growing(rollout_id), self._written.setdefault(rollout_id, set())
        done.add(part)
        own = [path for path in growing.glob(f"{part}*") if path.is_file()] if files is None else []
        self._files.setdefault(rollout_id, {}).update(sums(growing, own) if files is None else files)
        if not done.issuperset(self.parts):
            return False
        del self._written[rollout_id]
        told = {"rollout_id": rollout_id, "parts": sorted(done), "time": round(time.time(), 3), "files": self._files.pop(rollout_id)}
        self.reached("before_complete", rollout_id)
        _write(growing / COMPLETE, json.dumps(told, indent=1) + "\n")
        folder = self.folder(rollout_id)
        _replace(folder, growing)
        self.reached("after_complete", rollout_id)
        _write(self.directory / "latest", folder.name + "\n")
        self.last_complete = rollout_id
        self.tell(rollout_id, f"rollout {rollout_id} is saved in {folder}")
        self._prune(rollout_id)
        return True

    def score(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """An evaluation of the weights after `rollout_id`, which may come before or after they are saved."""
        value = metrics.get(self._best.removeprefix("-")) if self._best else None
        if value is not None and self._best is not None:
            self._scores[rollout_id] = -value if self._best.startswith("-") else value
            self.directory.mkdir(parents=True, exist_ok=True)
            _write(self.directory / "scores.json", json.dumps(self._scores) + "\n")
            self._best_of(complete(self.directory))

    def _best_of(self, found: Collection[int]) -> int | None:
        """The best of these that have a score, the newest among equals; the pointer is moved to it."""
        scored = [(self._scores[rollout_id], rollout_id) for rollout_id in found if rollout_id in self._scores]
        if not scored:
            return None
        best = max(scored)[1]
        _write(self.directory / "best", self.folder(best).name + "\n")
        return best

    def _prune(self, newest_id: int) -> None:
        found = complete(self.directory)
        best = self._best_of(found)
        if self.keep is None:
            return
        kept = set(sorted(found)[-self.keep :]) | ({best} if best is not None else set())
        for rollout_id in sorted(set(found) - kept):
            _remove(found[rollout_id])
            self.tell(newest_id, f"removed the older checkpoint {found[rollout_id]} (--keep-checkpoints {self.keep})")

    def _growing(self, rollout_id: int) -> Path:
        return self.directory / f".rollout_{rollout_id:06d}.{SAVING}"


def newest(load: str) -> Path:
    """The folder to resume from.

    Raises:
        ValueError: there is no complete checkpoint at `load`, or the one that it names is damaged.
    """
    folder = Path(load).expanduser().absolute()
    found = complete(folder)
    chosen = newest_checkpoint(folder)
    if chosen is not None:
        return found[chosen]
    if (folder / COMPLETE).exists():
        raise ValueError(f"--load: {damage(folder)}")
    raise ValueError(f"--load: no complete checkpoint (rollout_NNNNNN with {COMPLETE} in it, undamaged) at {load}")


def _replace(folder: Path, new: Path) -> None:
    """`new` gets the place of `folder`. Where that is taken, there is a moment without either name: `_mend` knows what to do then."""
    old = folder.with_name(f".{folder.name}.{OLD}")
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    new.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _mend(directory: Path) -> None:
    """What a killed run left: a checkpoint that was to be replaced is put back, unless its successor is there; unfinished ones go."""
    for old in directory.glob(f".rollout_*.{OLD}"):
        place = directory / old.name[1:].removesuffix(f".{OLD}")
        if place.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(place)
    for growing in directory.glob(f".rollout_*.{SAVING}"):
        shutil.rmtree(growing, ignore_errors=True)


def _remove(folder: Path) -> None:
    """It no longer counts before the first of its files goes."""
    (folder / COMPLETE).unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _read_scores(path: Path) -> dict[int, float]:
    try:
        return {int(rollout_id): float(value) for rollout_id, value in json.loads(path.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError):
        return {}


def _write(path: Path, text: str) -> None:
    """All of it or nothing, also when the machine stops."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync(path.parent)


def _sync(directory: Path) -> None:
    """What was renamed in it stays renamed."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
