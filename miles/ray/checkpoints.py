"""Checkpoints as a whole: where each part goes, and when one is complete.

    <checkpoint_dir>/latest                  name of the newest complete one
    <checkpoint_dir>/rollout_000003/actor/   critic/  executor.json  hf/  COMPLETE

The owners write their parts; COMPLETE is written last, when every part is on disk. A folder without it does not count.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path

logger = logging.getLogger(__name__)

COMPLETE = "COMPLETE"


class Checkpoints:
    """The book of what is saved. `parts` are all that a complete checkpoint has."""

    def __init__(self, directory: str, keep: int | None = None) -> None:
        self.directory = Path(directory).expanduser().absolute()
        self.keep = keep
        self.parts: Collection[str] = ("actor", "executor")
        self.reached: Callable[[str, int], None] = lambda point, rollout_id: None
        self.last_complete: int | None = None
        self._written: dict[int, set[str]] = {}

    def folder(self, rollout_id: int) -> Path:
        return self.directory / f"rollout_{rollout_id:06d}"

    def begin(self, rollout_id: int) -> str:
        """Called before a part is written. What lay there under this id no longer counts. Returns the folder."""
        folder = self.folder(rollout_id)
        if rollout_id not in self._written:
            self._written[rollout_id] = set()
            folder.mkdir(parents=True, exist_ok=True)
            (folder / COMPLETE).unlink(missing_ok=True)
        return str(folder)

    def written(self, rollout_id: int, part: str) -> bool:
        """A part is on disk. Completes the checkpoint if it was the last; returns whether it did."""
        done = self._written.setdefault(rollout_id, set())
        done.add(part)
        if not done.issuperset(self.parts):
            return False
        del self._written[rollout_id]
        folder = self.folder(rollout_id)
        self.reached("before_complete", rollout_id)
        _write(folder / COMPLETE, json.dumps({"rollout_id": rollout_id, "parts": sorted(done), "time": round(time.time(), 3)}) + "\n")
        self.reached("after_complete", rollout_id)
        _write(self.directory / "latest", folder.name + "\n")
        self.last_complete = rollout_id
        logger.info("rollout %d is saved in %s", rollout_id, folder)
        self._prune()
        return True

    def _prune(self) -> None:
        if self.keep is not None:
            for rollout_id in sorted(complete(self.directory))[: -self.keep]:
                folder = self.folder(rollout_id)
                (folder / COMPLETE).unlink()
                shutil.rmtree(folder, ignore_errors=True)
                logger.info("removed the older checkpoint %s (--keep-checkpoints %d)", folder, self.keep)


def complete(directory: Path) -> dict[int, Path]:
    """Rollout id -> folder of the complete checkpoints in `directory`, which may be one itself."""
    found = {}
    for folder in (directory, *directory.glob("rollout_*")) if directory.is_dir() else ():
        if (match := re.fullmatch(r"rollout_(\d+)", folder.name)) and (folder / COMPLETE).exists():
            found[int(match[1])] = folder
    return found


def newest(load: str) -> Path:
    """The folder to resume from.

    Raises:
        ValueError: there is no complete checkpoint at `load`.
    """
    found = complete(Path(load).expanduser().absolute())
    if not found:
        raise ValueError(f"--load: no complete checkpoint (rollout_NNNNNN with {COMPLETE} in it) at {load}")
    return found[max(found)]


def _write(path: Path, text: str) -> None:
    """All of it or nothing, also when the machine stops."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
