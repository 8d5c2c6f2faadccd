"""Shared memory: a file without a name that trainer and engines of one host map.

It holds two buckets, filled and read in turn, or all of them where there is room. The trainer writes straight into the mapped segment
and an engine copies straight out of it. It stays mapped from one publish to the next, so its pages are touched for the first time
only once. Engines open it through the trainer's descriptor in /proc: with the last process that has it, however it ends, it is gone.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
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


def directories() -> list[Path]:
    """Where segments may live: memory where the system offers it as files, else a mapped temporary file."""
    return [path for path in (Path("/dev/shm"), Path(tempfile.gettempdir())) if path.is_dir()]


class Segment:
    """One mapped file of the sender. `address` is where other processes open it, and how they know it from a later one."""

    def __init__(self, nbytes: int, where: Path) -> None:
        self.nbytes = nbytes
        self._file = tempfile.TemporaryFile(dir=where)  # noqa: SIM115 - open for as long as there are publishes
        descriptor = self._file.fileno()
        try:
            # reserved now: a file that is only long enough on paper ends the process with SIGBUS when it is written
            os.posix_fallocate(descriptor, 0, nbytes)
            memory = mmap.mmap(descriptor, nbytes)
        except BaseException:
            self.remove()
            raise
        self.buffer = torch.frombuffer(memory, dtype=torch.uint8)
        self.address = (f"/proc/{os.getpid()}/fd/{descriptor}", os.fstat(descriptor).st_ino)

    def remove(self) -> None:
        self._file.close()


class Sender:
    def __init__(self, where: Sequence[Path] | None = None) -> None:
        """
        Args:
            where: directories, the first with room is taken; default: `directories`.
        """
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
            self._held = self._segment(nbytes)
        assert self._held is not None
        self._begins = begins
        return {"address": self._held.address, "begins": begins}

    def _holds(self, nbytes: int) -> bool:
        return self._held is not None and self._held.nbytes == nbytes

    def _has_room(self, nbytes: int) -> bool:
        return nbytes <= SHARE * min(_free(self._where[0]), psutil.virtual_memory().available)

    def _segment(self, nbytes: int) -> Segment:
        refusals = []
        for place in self._where:
            try:
                segment = Segment(nbytes, place)
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
        self._address: tuple[str, int] | None = None
        self._mapped = torch.empty(0)
        self._plan: PublishPlan | None = None

    def open(self, plan: PublishPlan, rank: int) -> None:
        address = plan.channel["address"]
        if address != self._address:
            self._mapped, self._address = _map(*address), address
        self._plan = plan

    def receive(self, index: int) -> Tensor:
        assert self._plan is not None
        begin = self._plan.channel["begins"][index]
        return self._mapped[begin : begin + self._plan.bucket_nbytes[index]]

    def close(self) -> None:
        self._plan = None

    def dispose(self) -> None:
        self.close()
        self._address, self._mapped = None, torch.empty(0)


def _free(where: Path) -> int:
    stat = os.statvfs(where)
    return stat.f_bavail * stat.f_frsize


def _map(path: str, inode: int) -> Tensor:
    lost = f"shared memory for weights: {path} is not on this host, is another user's, or its trainer is gone"
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError as error:
        raise ValueError(f"{lost} ({error.strerror})") from None
    try:
        found = os.fstat(descriptor)
        if found.st_ino != inode:  # the number has gone to another file since
            raise ValueError(lost)
        return torch.frombuffer(mmap.mmap(descriptor, found.st_size), dtype=torch.uint8)
    finally:
        os.close(descriptor)
