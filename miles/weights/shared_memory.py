"""Shared memory: a file that trainer and engines of one host map.

It holds two buckets, filled and read in turn, or all of them where there is room. The trainer writes straight into the mapped segment
and an engine copies straight out of it. It stays mapped from one publish to the next, so its pages are touched for the first time
only once.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import re
import secrets
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from miles.types import PublishPlan
from miles.weights.buckets import layout

logger = logging.getLogger(__name__)

DEPTH = 2
"""Bucket i + 1 is filled while bucket i is read."""
SHARE = 0.25
"""Of the memory that is free, what a copy of all weights may take."""

PREFIX = "miles-weights-"


def directories() -> list[Path]:
    """Where segments may live: memory where the system offers it as files, else a mapped temporary file."""
    return [path for path in (Path("/dev/shm"), Path(tempfile.gettempdir())) if path.is_dir()]


class Segment:
    """One mapped file of the sender, locked for as long as this process lives, gone from the file system with it."""

    def __init__(self, label: str, nbytes: int, where: Path) -> None:
        self.nbytes = nbytes
        descriptor, self.path = _create(label, where)
        # unlinks at dispose and at a normal exit; after a kill, `remove_stale` finds the lock free
        self._finalizer = weakref.finalize(self, _remove, descriptor, self.path, os.getpid())
        try:
            # reserved now: a file that is only long enough on paper ends the process with SIGBUS when it is written
            os.posix_fallocate(descriptor, 0, nbytes)
            memory = mmap.mmap(descriptor, nbytes)
        except BaseException:
            self.remove()
            raise
        self.buffer = torch.frombuffer(memory, dtype=torch.uint8)

    def remove(self) -> None:
        self._finalizer()


class Sender:
    def __init__(self, label: str, where: Sequence[Path] | None = None) -> None:
        """
        Args:
            label: a part of the segments' names, for people who look at them.
            where: directories, the first with room is taken; default: `directories`.
        """
        self._label = re.sub(r"[^A-Za-z0-9_.]+", "_", label)[:40]
        self._where = where or directories()
        self._held: Segment | None = None
        self._begins: Sequence[int] = ()
        self._sizes: Sequence[int] = ()
        self.staged = False

    def open(self, bucket_nbytes: Sequence[int], version: int, num_receivers: int, stage: bool = False) -> dict[str, Any]:
        self._sizes = bucket_nbytes
        begins, nbytes = layout(bucket_nbytes, len(bucket_nbytes))
        self.staged = stage and (self._holds(nbytes) or self._has_room(nbytes))
        if not self.staged:
            begins, nbytes = layout(bucket_nbytes, DEPTH)
        if not self._holds(nbytes):
            self.dispose()
            for place in self._where:
                remove_stale(place)
            self._held = self._segment(nbytes)
        assert self._held is not None
        self._begins = begins
        return {"path": str(self._held.path), "begins": begins}

    def _holds(self, nbytes: int) -> bool:
        return self._held is not None and self._held.nbytes == nbytes

    def _has_room(self, nbytes: int) -> bool:
        return nbytes <= SHARE * min(_free(self._where[0]), psutil.virtual_memory().available)

    def _segment(self, nbytes: int) -> Segment:
        refusals = []
        for place in self._where:
            try:
                segment = Segment(self._label, nbytes, place)
            except OSError as error:
                refusals.append(f"{place}, which has {_free(place) >> 20} MiB free ({error.strerror})")
                continue
            if refusals:
                logger.warning(
                    "weights travel through a file in %s: %d MiB more did not fit in %s (docker: --shm-size)",
                    place,
                    nbytes >> 20,
                    "; ".join(refusals),
                )
            return segment
        raise ValueError(
            f"shared memory for weights: {nbytes >> 20} MiB more are needed and fit neither in {' nor in '.join(refusals)}; "
            f"enlarge the first (docker: --shm-size), lower --weight-bucket-mb, or take --weight-transport broadcast or disk"
        )

    def buffer(self, index: int) -> Tensor:
        assert self._held is not None
        return self._held.buffer[self._begins[index] : self._begins[index] + self._sizes[index]]

    def send(self, index: int) -> None:
        """Nothing to move: the bucket was written where the engines read it."""

    def close(self) -> None:
        """The segment stays for the next publish."""

    def dispose(self) -> None:
        if self._held is not None:
            self._held.remove()
        self._held = None


class Receiver:
    def __init__(self) -> None:
        self._path, self._mapped = "", torch.empty(0)
        self._plan: PublishPlan | None = None

    def open(self, plan: PublishPlan, rank: int) -> None:
        path = plan.channel["path"]
        if path != self._path:
            self._mapped, self._path = _map(path), path
        self._plan = plan

    def receive(self, index: int) -> Tensor:
        assert self._plan is not None
        begin = self._plan.channel["begins"][index]
        return self._mapped[begin : begin + self._plan.bucket_nbytes[index]]

    def close(self) -> None:
        self._plan = None

    def dispose(self) -> None:
        self.close()
        self._path, self._mapped = "", torch.empty(0)


def remove_stale(where: Path) -> None:
    """Remove the segments of senders that were killed: the lock of each is free, whichever process or container had it."""
    for path in where.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, in use, or just removed by someone else
            descriptor = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


def _create(label: str, where: Path) -> tuple[int, Path]:
    """A new file that is locked and still there: another start may have taken it for a stale one before it was locked."""
    while True:
        path = where / f"{PREFIX}{label}-{os.getpid()}-{secrets.token_hex(4)}"
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return descriptor, path
        os.close(descriptor)


def _remove(descriptor: int, path: Path, owner: int) -> None:
    if os.getpid() != owner:  # a forked child that exits must not take its parent's segment along
        return
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _free(where: Path) -> int:
    stat = os.statvfs(where)
    return stat.f_bavail * stat.f_frsize


def _map(path: str) -> Tensor:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        raise ValueError(f"shared memory for weights: {path} is not on this host, or its trainer is gone") from None
    try:
        return torch.frombuffer(mmap.mmap(descriptor, os.fstat(descriptor).st_size), dtype=torch.uint8)
    finally:
        os.close(descriptor)
