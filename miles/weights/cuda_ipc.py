"""CUDA IPC: memory on the trainer's GPU that engines of the same host map.

It holds two buckets, filled and read in turn, or all of them where there is room. Not a byte passes through host memory. The memory
and its mapping stay from one publish to the next; the handle travels in the plan's channel. An engine in the trainer's own process
takes the memory itself, for CUDA maps nothing into its own process.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from miles.types import PublishPlan
from miles.weights.buckets import layout

DEPTH = 2
"""Bucket i + 1 is filled while bucket i is read."""
SPARE = 0.1
"""Share of a GPU's memory that a copy of all weights must leave free."""

_own_buffers: weakref.WeakValueDictionary[str, Tensor] = weakref.WeakValueDictionary()
_Storage: Any = torch.UntypedStorage  # its methods for CUDA IPC, which torch.multiprocessing is built on, have no type stubs


class Shared:
    """One buffer that other processes may map."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.name = secrets.token_hex(8)
        storage: Any = self.buffer.untyped_storage()
        self.handle = tuple(storage._share_cuda_()[1:])  # the first is the device's number here, which is another elsewhere
        _own_buffers[self.name] = self.buffer

    def free(self) -> None:
        """Give the memory back to this process, also where a receiver never came or died: torch counts readers that are left."""
        counter, place = self.handle[3:5]
        _Storage._release_ipc_counter(counter, place, device=self.buffer.device.index)
        del self.buffer


class Sender:
    def __init__(self, device: torch.device) -> None:
        """
        Raises:
            ValueError: the trainer's weights are not on a GPU.
        """
        if device.type != "cuda":
            raise ValueError(f"--weight-transport cuda_ipc: the trainer's weights are on {device}, not on a GPU")
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._shared: Shared | None = None
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
            self._shared = Shared(nbytes, self._device)
        assert self._shared is not None
        self._begins = begins
        return {"gpu": uuid_of(self._device.index), "name": self._shared.name, "handle": self._shared.handle, "begins": begins}

    def _holds(self, nbytes: int) -> bool:
        return self._shared is not None and self._shared.buffer.numel() == nbytes

    def _has_room(self, nbytes: int) -> bool:
        free, total = torch.cuda.mem_get_info(self._device)
        return free - nbytes >= SPARE * total

    def buffer(self, index: int) -> Tensor:
        assert self._shared is not None
        return self._shared.buffer[self._begins[index] : self._begins[index] + self._sizes[index]]

    def send(self, index: int) -> None:
        """The bucket lies where the engines read it; wait until its last byte does. Of a staged publish only the last one is waited for."""
        if not self.staged or index == len(self._sizes) - 1:
            torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """The memory stays for the next publish."""

    def dispose(self) -> None:
        if self._shared is not None:
            self._shared.free()
        self._shared = None


class Receiver:
    def __init__(self) -> None:
        self._name, self._mapped = "", torch.empty(0)
        self._plan: PublishPlan | None = None

    def open(self, plan: PublishPlan, rank: int) -> None:
        channel = plan.channel
        if channel["name"] != self._name:
            self.dispose()
            self._mapped, self._name = _map(channel["gpu"], channel["name"], channel["handle"]), channel["name"]
        self._plan = plan

    def receive(self, index: int) -> Tensor:
        assert self._plan is not None
        begin = self._plan.channel["begins"][index]
        return self._mapped[begin : begin + self._plan.bucket_nbytes[index]]

    def close(self) -> None:
        self._plan = None

    def dispose(self) -> None:
        self.close()
        self._name, self._mapped = "", torch.empty(0)


def uuid_of(index: int) -> str:
    """Names a GPU in all processes, whatever number each of them knows it by."""
    return str(torch.cuda.get_device_properties(index).uuid)


def _map(gpu: str, name: str, handle: Sequence[Any]) -> Tensor:
    if (own := _own_buffers.get(name)) is not None:
        return own
    index = next((i for i in range(torch.cuda.device_count()) if uuid_of(i) == gpu), None)
    if index is None:
        raise ValueError(f"--weight-transport cuda_ipc: this engine does not see the trainer's GPU {gpu}; broadcast needs no such sight")
    torch.cuda.init()
    with torch.cuda.device(index):
        storage = _Storage._new_shared_cuda(index, *handle)
        return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index)).set_(storage)
