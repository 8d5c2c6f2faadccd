"""The ranks of one role: how they meet, where they compute, and sums over all of them."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def pick_device(wanted: str) -> torch.device:
    """The device that --device names. Workers on GPUs see only the GPUs that were given to them."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU")
    return torch.device("cuda", torch.cuda.current_device())


class Ranks:
    """The data-parallel ranks of one role. One rank alone needs no process group, unless FSDP does its casting."""

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self.mesh: DeviceMesh | None = None
        self.saving: dist.ProcessGroup | None = None  # for checkpoints alone, which are written by a thread of their own
        self._meeting: dist.ProcessGroup | None = None
        self._own_group = False

    def join(self, master_address: str, master_port: int, timeout: float, sharded: bool) -> None:
        """Meet the other ranks. `sharded`: make the device mesh that FSDP needs.

        A process that already is this rank of a group of this size, for its other role, uses that group.

        Raises:
            ValueError: this process already is another rank.
        """
        if not sharded:
            assert self.world_size == 1
            return
        if dist.is_initialized():
            if (dist.get_world_size(), dist.get_rank()) != (self.world_size, self.rank):
                raise ValueError("--in-process: this process already is another rank; set --num-trainers 1")
        else:
            dist.init_process_group(
                backend="cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo",
                init_method=f"tcp://{master_address}:{master_port}",
                rank=self.rank,
                world_size=self.world_size,
                timeout=timedelta(seconds=timeout),
                device_id=self.device if self.device.type == "cuda" else None,
            )
            self._own_group = True
        self.mesh = init_device_mesh(self.device.type, (self.world_size,))
        self.saving, self._meeting = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")

    def sum(self, values: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def max(self, values: Tensor) -> Tensor:
        if self.world_size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier(group=self._meeting)

    def leave(self) -> None:
        """Idempotent."""
        if self._own_group and dist.is_initialized():
            dist.destroy_process_group()
        self._own_group = False
