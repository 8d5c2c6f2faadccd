"""Disk: one file per bucket in a directory that all hosts see. Slow, and works wherever a shared file system does."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from miles.config.whole_files import sync_directory
from miles.types import PublishPlan

PREFIX = "miles-weights-"
_VISIBLE_SECONDS = 60.0  # within which a network file system shows a file that another host renamed


class Sender:
    """Writes each bucket aside, syncs it, and renames it: under its name it is complete or absent."""

    staged = False

    def __init__(self, label: str, where: Path) -> None:
        self._name = f"{PREFIX}{re.sub(r'[^A-Za-z0-9_.]+', '_', label)[:40]}-{os.getpid()}-{secrets.token_hex(4)}"
        self._where = where
        self._lock: IO[bytes] | None = None
        self._folder: Path | None = None
        self._sizes: Sequence[int] = ()
        self._memory = torch.empty(0, dtype=torch.uint8)

    def open(self, bucket_nbytes: Sequence[int], version: int, num_receivers: int, stage: bool = False) -> dict[str, Any]:
        self.close()
        if self._lock is None:
            self._where.mkdir(parents=True, exist_ok=True)
            remove_stale(self._where)
            self._lock = _make_home(self._where, self._name)
        self._folder = self._where.absolute() / self._name / f"v{version:06d}-{secrets.token_hex(2)}"
        self._folder.mkdir()
        self._sizes = bucket_nbytes
        if len(self._memory) < max(bucket_nbytes):
            self._memory = torch.empty(max(bucket_nbytes), dtype=torch.uint8)
        return {"folder": str(self._folder)}

    def buffer(self, index: int) -> Tensor:
        return self._memory[: self._sizes[index]]

    def send(self, index: int) -> None:
        assert self._folder is not None
        path = self._folder / _file_name(index)
        aside = path.with_suffix(".part")
        with aside.open("wb") as file:
            file.write(self.buffer(index).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path)
        sync_directory(self._folder)

    def close(self) -> None:
        """The files go: a publish is received when it ends, or never."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None

    def dispose(self) -> None:
        self.close()
        if self._lock is not None:
            shutil.rmtree(self._where / self._name, ignore_errors=True)
            self._lock.close()
        self._lock = None


class Receiver:
    def __init__(self, visible_seconds: float = _VISIBLE_SECONDS) -> None:
        self._visible_seconds = visible_seconds
        self._plan: PublishPlan | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def open(self, plan: PublishPlan, rank: int) -> None:
        self._plan = plan
        if len(self._memory) < max(plan.bucket_nbytes):
            self._memory = torch.empty(max(plan.bucket_nbytes), dtype=torch.uint8)

    def receive(self, index: int) -> Tensor:
        assert self._plan is not None
        path = Path(self._plan.channel["folder"]) / _file_name(index)
        bucket = self._memory[: self._plan.bucket_nbytes[index]]
        with _opened(path, self._visible_seconds) as file:
            size = os.fstat(file.fileno()).st_size
            if size != len(bucket) or file.readinto(bucket.numpy().data) != size:  # type: ignore[attr-defined]
                raise ValueError(f"{path} has {size} bytes, planned were {len(bucket)}")
        return bucket

    def close(self) -> None:
        self._plan = None

    def dispose(self) -> None:
        self.close()


def remove_stale(where: Path) -> None:
    """Remove what senders that were killed left in `where`: the lock of each is free."""
    for lock in where.glob(f"{PREFIX}*/lock"):
        with contextlib.suppress(OSError), lock.open("rb+") as file:  # held, no locks on this file system, or just removed
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)


def _make_home(where: Path, name: str) -> IO[bytes]:
    """Make the sender's folder with its lock held. It gets its name, by which others look, when that is done."""
    aside = where / f".{name}"
    aside.mkdir()
    lock = (aside / "lock").open("wb")
    with contextlib.suppress(OSError):  # no locks here: nothing will be taken for stale either
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    aside.rename(where / name)
    return lock


def _opened(path: Path, patience: float) -> IO[bytes]:
    deadline = time.monotonic() + patience
    while True:
        try:
            return path.open("rb", buffering=0)
        except FileNotFoundError:
            if time.monotonic() >= deadline:
                raise ValueError(f"{path} is not there; all hosts must see the directory of --weight-sync-dir") from None
            time.sleep(0.05)


def _file_name(index: int) -> str:
    return f"bucket-{index:05d}.bin"
