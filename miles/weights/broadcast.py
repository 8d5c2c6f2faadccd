"""Broadcast: one torch.distributed group of the sending trainer rank and all engines, apart from the trainer's own.

The group is built on a TCP store that lives in the sender, without torch.distributed's default group, so it disturbs
nobody's. Who takes part is settled anew at every publish: each engine puts its name down in the store, and the sender
decides before the first bucket whether the group it has is still the right one. So an engine that was restarted, or
left, leads to a new group and never to a hanging collective.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from miles.types import PublishPlan
from miles.weights.broadcast_group import CONNECT_SECONDS, Desk, Group, address_toward


class Sender:
    """Rank 0 of the group. All ends of a bucket move at once: `send` returns when every engine has it."""

    staged = False

    def __init__(self, address: str, backend: str, device: torch.device, timeout: float) -> None:
        """
        Args:
            address: where engines reach this process.
            backend: "nccl" with one GPU for each member, else "gloo".
            device: where buckets are filled.
            timeout: seconds to wait for engines.
        """
        self._address = address
        self._backend = backend
        self._device = device if backend == "nccl" else torch.device("cpu")
        self._timeout = timeout
        self._name = secrets.token_hex(8)
        self._store: dist.TCPStore | None = None
        self._desk: Desk | None = None
        self._publish = 0
        self._num_receivers = 0
        self._sizes: Sequence[int] = ()
        self._memory: Tensor | None = None
        self._group = Group(timeout)
        self._members: list[bytes] = []
        self._sent = 0

    def open(self, bucket_nbytes: Sequence[int], version: int, num_receivers: int, stage: bool = False) -> dict[str, Any]:
        if self._store is None:
            self._store = dist.TCPStore(self._address, 0, is_master=True, timeout=timedelta(seconds=self._timeout), wait_for_workers=False)
        if self._desk is not None:
            self._desk.clear()
        self._publish += 1
        self._num_receivers, self._sizes, self._sent = num_receivers, bucket_nbytes, 0
        self._desk = Desk(self._store, self._publish, num_receivers, self._timeout)
        return {
            "address": self._address,
            "port": self._store.port,
            "sender": self._name,
            "backend": self._backend,
            "publish": self._publish,
            "num_receivers": num_receivers,
        }

    def buffer(self, index: int) -> Tensor:
        if self._memory is None or len(self._memory) < max(self._sizes):
            self._memory = torch.empty(max(self._sizes), dtype=torch.uint8, device=self._device)
        return self._memory[: self._sizes[index]]

    def send(self, index: int) -> None:
        if self._num_receivers:
            if index == 0:
                self._settle()
            self._group.broadcast(self.buffer(index))
        self._sent += 1

    def close(self) -> None:
        if self._desk is not None and self._sent < len(self._sizes):
            self._desk.give_up()
            self._group.leave()
        self._sizes = ()
        if self._device.type != "cpu":
            self._memory = None

    def dispose(self) -> None:
        self.close()
        self._group.leave()
        self._desk, self._store, self._memory = None, None, None

    def _settle(self) -> None:
        """Keep the group when exactly its members put their names down for this publish, else make a new one."""
        assert self._desk is not None
        assert self._store is not None
        members = self._desk.members()
        keep = self._group.joined and members == self._members
        number = self._desk.decide(self._group.number if keep else self._publish)
        if not keep:
            self._group.join(self._store, number, 0, self._num_receivers + 1, backend=self._backend, address=self._address)
            self._members = members


class Receiver:
    """One engine in the group."""

    def __init__(self, device: torch.device, timeout: float) -> None:
        self._device = device
        self._timeout = timeout
        self._name = secrets.token_hex(8)
        self._store: dist.TCPStore | None = None
        self._sender = ""  # whose store that is
        self._desk: Desk | None = None
        self._plan: PublishPlan | None = None
        self._rank = 0
        self._received = 0
        self._memory: Tensor | None = None
        self._group = Group(timeout)

    def open(self, plan: PublishPlan, rank: int) -> None:
        channel = plan.channel
        if not 0 <= rank < channel["num_receivers"]:
            raise ValueError(f"receiver rank {rank} does not exist in a publish to {channel['num_receivers']} engines")
        if channel["sender"] != self._sender:
            self._group.leave()
            self._store = dist.TCPStore(
                channel["address"],
                channel["port"],
                is_master=False,
                timeout=timedelta(seconds=min(self._timeout, CONNECT_SECONDS)),
                wait_for_workers=False,
            )
            self._sender = channel["sender"]
        assert self._store is not None
        self._desk = Desk(self._store, channel["publish"], channel["num_receivers"], self._timeout)
        self._desk.sign(rank, self._name)
        self._plan, self._rank, self._received = plan, rank, 0
        if self._memory is None or len(self._memory) < max(plan.bucket_nbytes):
            where = self._device if channel["backend"] == "nccl" else torch.device("cpu")
            self._memory = torch.empty(max(plan.bucket_nbytes), dtype=torch.uint8, device=where)

    def receive(self, index: int) -> Tensor:
        assert self._plan is not None
        assert self._memory is not None
        if index == 0:
            self._follow(self._plan.channel)
        bucket = self._memory[: self._plan.bucket_nbytes[index]]
        self._group.broadcast(bucket)
        self._received += 1
        return bucket

    def close(self) -> None:
        if self._plan is not None and self._received < len(self._plan.buckets):
            assert self._desk is not None
            self._desk.give_up()
            self._group.leave()
        self._plan = None
        if self._memory is not None and self._memory.device.type != "cpu":
            self._memory = None

    def dispose(self) -> None:
        self.close()
        self._group.leave()
        self._desk, self._store, self._sender, self._memory = None, None, "", None

    def _follow(self, channel: dict[str, Any]) -> None:
        assert self._desk is not None
        assert self._store is not None
        number = self._desk.decision()
        if number != self._group.number:
            own = address_toward(channel["address"], channel["port"])
            self._group.join(self._store, number, self._rank + 1, channel["num_receivers"] + 1, backend=channel["backend"], address=own)
