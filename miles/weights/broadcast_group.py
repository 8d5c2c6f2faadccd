"""Who takes part in a broadcast, settled through a store, and the process group of those who do."""

from __future__ import annotations

import contextlib
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CONNECT_SECONDS = 30.0  # within which those who put their names down must be connected
_GIVEN_UP = "given up"


class Desk:
    """The keys of one publish in the store: who takes part, and what the sender decided.

    The decision is made once, by whoever is first: the sender with a group's number, or anyone who gives up. So nobody
    waits for an end that has left.
    """

    def __init__(self, store: dist.TCPStore, publish: int, num_receivers: int, timeout: float) -> None:
        self._store = store
        self._decision = f"{publish}/decision"
        self._names = [f"{publish}/member/{rank}" for rank in range(num_receivers)]
        self._timeout = timedelta(seconds=timeout)

    def sign(self, rank: int, name: str) -> None:
        there = self._store.compare_set(self._names[rank], "", name).decode()
        if there != name:
            raise ValueError(f"receiver rank {rank} was given to two engines, or this publish was given up")

    def members(self) -> list[bytes]:
        try:
            self._store.wait(self._names, self._timeout)
        except dist.DistError as error:
            absent = [name for name in self._names if not self._store.check([name])]
            raise TimeoutError(
                f"broadcast of weights: engines {[name.rsplit('/')[-1] for name in absent]} of {len(self._names)} did not come "
                f"within {self._timeout.total_seconds():.0f} s"
            ) from error
        return [self._store.get(name) for name in self._names]

    def decide(self, number: int) -> int:
        return self._read(self._store.compare_set(self._decision, "", str(number)))

    def decision(self) -> int:
        try:
            self._store.wait([self._decision], self._timeout)
        except dist.DistError as error:
            raise TimeoutError(
                f"broadcast of weights: the trainer did not start to send within {self._timeout.total_seconds():.0f} s, or is gone"
            ) from error
        return self._read(self._store.get(self._decision))

    def give_up(self) -> None:
        """Tell all ends; those who wait for names or for the decision go on and see it."""
        with contextlib.suppress(dist.DistError):  # the sender's store is gone, and with it everyone who could wait
            self._store.compare_set(self._decision, "", _GIVEN_UP)
            for name in self._names:
                self._store.compare_set(name, "", _GIVEN_UP)

    def clear(self) -> None:
        for key in (self._decision, *self._names):
            self._store.delete_key(key)

    @staticmethod
    def _read(value: bytes) -> int:
        if value.decode() == _GIVEN_UP:
            raise RuntimeError("broadcast of weights: another end gave this publish up")
        return int(value)


class Group:
    """A process group outside torch.distributed's default one. `number` is that of the publish that made it, 0 for none."""

    def __init__(self, timeout: float) -> None:
        self.number = 0
        self._timeout = timedelta(seconds=timeout)
        self._members: Any = None

    @property
    def joined(self) -> bool:
        return self._members is not None

    def join(self, store: dist.Store, number: int, rank: int, size: int, *, backend: str, address: str) -> None:
        """Connect with all members; each gives the address under which the others reach it."""
        self.leave()
        prefixed = dist.PrefixStore(f"{number}/group", store)
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            self._members = dist.ProcessGroupNCCL(prefixed, rank, size, options)
        else:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            options._timeout = timedelta(seconds=CONNECT_SECONDS)
            self._members = dist.ProcessGroupGloo(prefixed, rank, size, options)
        self.number = number

    def broadcast(self, tensor: Tensor) -> None:
        """From rank 0 to all; done when it returns. A member that fails makes it fail, and the group is left."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = self._timeout
        try:
            self._members.broadcast([tensor], options).wait()
            if tensor.is_cuda:
                torch.cuda.synchronize(tensor.device)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        if self._members is not None:
            self._members.abort()
        self._members, self.number = None, 0


def address_toward(host: str, port: int) -> str:
    """The address of this host under which `host` reaches it: that of the interface that leads there."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def own_address() -> str:
    """The address of this host for other hosts: that of the interface to the rest of the world, or what its name stands for."""
    address = address_toward("192.0.2.1", 9)  # an address for documentation: only the way out matters
    if address != "127.0.0.1":
        return address
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return address
