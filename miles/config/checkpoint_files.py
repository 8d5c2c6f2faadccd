"""Checkpoints on the disk: which are complete, and whether their bytes are those that were written.

<directory>/rollout_000003/COMPLETE      written last: {"rollout_id", "parts", "time", "files": {path: {"bytes", "sha256"}}}
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

logger = logging.getLogger(__name__)

COMPLETE = "COMPLETE"
FileSums = Mapping[str, Mapping[str, int | str]]
"""Path in the checkpoint -> {"bytes", "sha256"}."""
READERS = 4


def complete(directory: Path) -> dict[int, Path]:
    """Rollout id -> folder of the complete checkpoints in `directory`, which may be one itself."""
    found = {}
    for folder in (directory, *directory.glob("rollout_*")) if directory.is_dir() else ():
        if (match := re.fullmatch(r"rollout_(\d+)", folder.name)) and (folder / COMPLETE).exists():
            found[int(match[1])] = folder
    return found


def damage(folder: Path) -> str:
    """What is wrong with the files of a complete checkpoint, naming the first; "" when nothing is. Reads all of them, once a process."""
    stat = (folder / COMPLETE).stat()
    return _damage(folder.absolute(), stat.st_mtime_ns, stat.st_ino)


@functools.lru_cache(maxsize=256)
def _damage(folder: Path, written: int, inode: int) -> str:
    try:
        files: FileSums = json.loads((folder / COMPLETE).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return _warned(folder, f"{folder / COMPLETE} cannot be read: {error}")
    with ThreadPoolExecutor(READERS) as pool:
        problems = [problem for problem in pool.map(lambda name: _compare(folder / name, files[name]), files) if problem]
    return _warned(folder, problems[0]) if problems else ""


def _warned(folder: Path, problem: str) -> str:
    logger.warning("the checkpoint %s is damaged and does not count: %s", folder, problem)
    return problem


def _compare(path: Path, expected: Mapping[str, int | str]) -> str:
    try:
        size = path.stat().st_size
        if size != expected["bytes"]:
            return f"{path} has {size} bytes, {expected['bytes']} were written"
        return "" if _sha256(path) == expected["sha256"] else f"{path} does not have the checksum that was written"
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    except (KeyError, TypeError):
        return f"{path}: its length or checksum is not in {COMPLETE}"


def sums(folder: Path, paths: Iterable[Path]) -> dict[str, dict[str, int | str]]:
    """Length and checksum of these files, by their place in `folder`."""
    return {str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(paths)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
