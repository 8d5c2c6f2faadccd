"""The folder that a local Ray works in, and those that runs left behind which had no chance to remove theirs."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

_PREFIX = "miles-"
_LOCK = "in_use"


class TempFolder:
    """A new folder, removed by `remove`. A lock in it says that it is in use: the kernel lifts that with its process, however it ends."""

    def __init__(self, root: str = "/tmp") -> None:
        # Short, because Unix sockets live in it and their paths may have 107 bytes.
        self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=root)
        fresh = f"{self.path}/new"
        self._lock = os.open(fresh, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(fresh, f"{self.path}/{_LOCK}")  # nobody sees the file before it is locked

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_stale(root: str = "/tmp") -> list[str]:
    """Remove this user's folders that no process uses. Returns their paths; never raises."""
    removed = []
    for path in Path(root).glob(f"{_PREFIX}*/{_LOCK}"):
        folder = str(path.parent)
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.getuid() and _unlocked(path) and not _named_by_a_process(folder):
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
    if removed:
        logger.info("removed what runs that were killed left behind: %s", ", ".join(removed))
    return removed


def _unlocked(path: Path) -> bool:
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True


def _named_by_a_process(folder: str) -> bool:
    """Ray's own processes outlive a killed driver for a while; they have the folder in their command lines."""
    lines = (process.info["cmdline"] or () for process in psutil.process_iter(["cmdline"]))
    return any(folder in word for line in lines for word in line)
