"""Checkpoints as a whole: where each part goes, when one is complete, and which are kept.

    <checkpoint_dir>/latest                  name of the newest complete one; moves last
    <checkpoint_dir>/best                    name of the best one, with --keep-best-metric
    <checkpoint_dir>/scores.json             that metric, by rollout
    <checkpoint_dir>/rollout_000003/actor/   critic/  executor.json  hf/  COMPLETE

A checkpoint grows in .rollout_000003.saving and gets its name when every part is on disk and COMPLETE, with the checksums of all files,
lies in it. So what has that name is whole, also while the same rollout is saved again, and whatever kills the run.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import shutil
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from miles.config.checkpoint_files import COMPLETE, FileSums, complete, damage, sums
from miles.config.places import newest_checkpoint
from miles.config.whole_files import sync_directory, write_whole

logger = logging.getLogger(__name__)

SAVING, OLD, ASIDE = "saving", "old", "aside"
_OF_THE_DISK = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE, errno.EACCES, errno.EPERM),
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST, errno.ENAMETOOLONG),
}


class SaveError(RuntimeError):
    """A checkpoint could not be written, for a reason that the file system gave; the message says where, why and what is left."""


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
        self._missed: set[str] = set()
        _mend(self.directory)

    def folder(self, rollout_id: int) -> Path:
        return self.directory / f"rollout_{rollout_id:06d}"

    def going_on(self, last: int) -> None:
        """The run goes on after rollout `last`: what was measured of later ones is not true of those that come."""
        self._scores = {rollout_id: value for rollout_id, value in self._scores.items() if rollout_id <= last}

    @contextmanager
    def writing(self, rollout_id: int) -> Iterator[None]:
        """Around whatever writes a part. Raises SaveError for what the file system refused, whichever library tells it in whichever way."""
        try:
            yield
        except SaveError:
            raise
        except Exception as error:
            if not (reason := _refused_by_disk(error)):
                raise
            with suppress(OSError):
                reason += f" ({shutil.disk_usage(self.directory).free / 2**20:.1f} MiB are free)"
            whole = sorted(complete(self.directory))
            left = (
                f"{self.folder(whole[-1]).name}, which is complete, is what a resumed run goes on from"
                if whole
                else "there is none before it"
            )
            raise SaveError(
                f"--save {self.directory}: the checkpoint of rollout {rollout_id} cannot be written: {reason}; {left}"
            ) from error

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
        write_whole(growing / COMPLETE, json.dumps(told, indent=1) + "\n")
        folder = self.folder(rollout_id)
        _replace(folder, growing)
        self.reached("after_complete", rollout_id)
        write_whole(self.directory / "latest", folder.name + "\n")
        self.last_complete = rollout_id
        self.tell(rollout_id, f"rollout {rollout_id} is saved in {folder}")
        self._prune(rollout_id)
        return True

    def score(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """An evaluation of the weights after `rollout_id`, which may come before or after they are saved."""
        if self._best is None or not metrics:
            return
        name = self._best.removeprefix("-")
        value = metrics.get(name)
        if value is None or not math.isfinite(value):
            if name not in self._missed:
                self._missed.add(name)
                told = "--keep-best-metric %s: the evaluation after rollout %d has %s, so its checkpoint cannot be the best one"
                logger.warning(told, self._best, rollout_id, f"only {', '.join(sorted(metrics))}" if value is None else value)
        else:
            self._scores[rollout_id] = -value if self._best.startswith("-") else value
            self.directory.mkdir(parents=True, exist_ok=True)
            write_whole(self.directory / "scores.json", json.dumps(self._scores) + "\n")
            self._best_of(complete(self.directory))

    def _best_of(self, found: Collection[int]) -> int | None:
        """The best of these that have a score, the newest among equals; the pointer is moved to it."""
        scored = [(self._scores[rollout_id], rollout_id) for rollout_id in found if rollout_id in self._scores]
        if not scored:
            return None
        best = max(scored)[1]
        write_whole(self.directory / "best", self.folder(best).name + "\n")
        return best

    def _prune(self, newest_id: int) -> None:
        found = complete(self.directory)
        for later in [rollout_id for rollout_id in found if rollout_id > newest_id]:  # else they would count as newer than this one
            aside = _set_aside(found.pop(later))
            self.tell(newest_id, f"{self.folder(later)} is now {aside.name}: the run went on from an earlier checkpoint than that one")
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
    sync_directory(folder.parent)
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


def _set_aside(folder: Path) -> Path:
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{ASIDE}{number}")).exists():
        number += 1
    return folder.rename(aside)


def _refused_by_disk(error: BaseException) -> str:
    """The file system's reason behind an error, "" when there is none. Libraries hand it on as text only, and so do other processes."""
    text = "".join(traceback.format_exception(error))
    numbers = [int(one or other) for one, other in re.findall(r"\[Errno (\d+)\]|\(os error (\d+)\)", text)]
    cut_short = re.search(r"unexpected pos \d+ vs \d+|PytorchStreamWriter failed writing", text)  # torch keeps the number to itself
    return next((os.strerror(number) for number in numbers if number in _OF_THE_DISK), "a file was taken only in part" if cut_short else "")


def _remove(folder: Path) -> None:
    """It no longer counts before the first of its files goes."""
    (folder / COMPLETE).unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _read_scores(path: Path) -> dict[int, float]:
    try:
        return {int(rollout_id): float(value) for rollout_id, value in json.loads(path.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError):
        return {}
