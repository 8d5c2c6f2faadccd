"""CUDA IPC: two buffers on the trainer's GPU that engines of the same host map, filled and read in turn.

Not a byte passes through host memory. The buffers and their mappings stay from one publish to the next; the handles travel in the
plan's channel. An engine in the trainer's own process takes the buffers themselves, for CUDA maps nothing into its own process.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from miles.types import PublishPlan

DEPTH = 2
"""Buffers: bucket i + 1 is filled while bucket i is read."""

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
        self._shared: list[Shared] = []
        self._sizes: Sequence[int] = ()

    def open(self, bucket_nbytes: Sequence[int], version: int, num_receivers: int) -> dict[str, Any]:
        needed = [max(bucket_nbytes[slot::DEPTH]) for slot in range(min(DEPTH, len(bucket_nbytes)))]
        if [shared.buffer.numel() for shared in self._shared] != needed:
            self.dispose()
            self._shared = [Shared(nbytes, self._device) for nbytes in needed]
        self._sizes = bucket_nbytes
        return {"gpu": uuid_of(self._device.index), "buffers": [(shared.name, shared.handle) for shared in self._shared]}

    def buffer(self, index: int) -> Tensor:
        return self._shared[index % DEPTH].buffer[: self._sizes[index]]

    def send(self, index: int) -> None:
        """The bucket lies where the engines read it; wait until its last byte does."""
        torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """The buffers stay for the next publish."""

    def dispose(self) -> None:
        while self._shared:
            self._shared.pop().free()


class Receiver:
    def __init__(self) -> None:
        self._mapped: dict[str, Tensor] = {}
        self._plan: PublishPlan | None = None

    def open(self, plan: PublishPlan, rank: int) -> None:
        channel = plan.channel
        known, self._mapped = self._mapped, {}
        for name, handle in channel["buffers"]:
            self._mapped[name] = known[name] if name in known else _map(channel["gpu"], name, handle)
        self._plan = plan

    def receive(self, index: int) -> Tensor:
        assert self._plan is not None
        name, _ = self._plan.channel["buffers"][index % DEPTH]
        return self._mapped[name][: self._plan.bucket_nbytes[index]]

    def close(self) -> None:
        self._plan = None

    def dispose(self) -> None:
        self.close()
        self._mapped = {}


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
