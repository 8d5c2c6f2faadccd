"""One rank's part of the weights of a tensor parallel server.

A rank holds parts of tensors, so their checksums cannot be read from what lies there. Instead each part is compared, bit for bit and
right after it was loaded, with its place in the full tensor that came, and the checksum of that is what the rank vouches for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from miles.engines.sglang.places import NamedShape, Places
from miles.protocols import WeightReceiver
from miles.types import PublishPlan
from miles.weights.buckets import view_of
from miles.weights.checksum import checksum
from miles.weights.receiver import Write
from miles.weights.transports import make_receiver


class ShardedWeights:
    """One rank's end of a publish.

    Args:
        tensors: what a publish brings.
        places: where this rank has its parts.
        write: puts full tensors into place.
        rank: among the server's ranks.
        share: for a collective transport, which reaches one rank of a server: hands rank 0's bucket to all of them.
    """

    def __init__(
        self,
        tensors: Sequence[NamedShape],
        places: Places,
        write: Write,
        *,
        rank: int,
        timeout: float,
        share: Callable[[Tensor], None],
    ) -> None:
        self._shapes = {name: (dtype, shape) for name, dtype, shape in tensors}
        self.places, self._write, self._rank, self._timeout, self._share = places, write, rank, timeout, share
        self._plan: PublishPlan | None = None
        self._receiver: WeightReceiver | None = None
        self._transport = ""
        self._sums: dict[str, str] = {}

    def begin(self, plan: PublishPlan, receiver_rank: int) -> None:
        self.abort()
        coming = {spec.name: (spec.dtype, spec.shape) for bucket in plan.buckets for spec in bucket}
        faults = [f"{name} is unknown here" for name in coming if name not in self._shapes]
        faults += [f"{name} is not sent" for name in self._shapes if name not in coming]
        faults += [
            f"{name} is {coming[name]} on the wire and {own} here" for name, own in self._shapes.items() if coming.get(name, own) != own
        ]
        if faults:
            raise ValueError(f"weight version {plan.version} does not fit this engine: {'; '.join(faults[:8])}")
        if plan.transport != self._transport:
            self.dispose()
            self._receiver, self._transport = make_receiver(plan.transport, self._device, self._timeout), plan.transport
        assert self._receiver is not None
        if self._rank == 0 or not plan.concurrent:
            self._receiver.open(plan, receiver_rank)
        self._plan, self._sums = plan, {}

    @property
    def _device(self) -> torch.device:
        return next(iter(self.places.values())).target.device

    @torch.no_grad()
    def receive(self, index: int) -> None:
        plan = self._plan
        assert plan is not None, "receive before begin"
        assert self._receiver is not None
        if not plan.concurrent:
            buffer = self._receiver.receive(index)
        else:
            whole = torch.empty(plan.bucket_nbytes[index], dtype=torch.uint8, device=self._device)
            buffer = self._receiver.receive(index).to(self._device) if self._rank == 0 else whole
            self._share(buffer)
        tensors = [(spec.name, view_of(buffer, spec)) for spec in plan.buckets[index]]
        self._write(tensors)
        for name, tensor in tensors if plan.checksum else []:
            self._sums[name] = checksum(tensor, plan.checksum) if self._arrived(name, tensor) else f"differs on rank {self._rank}"
        if buffer.is_cuda:
            torch.cuda.current_stream(buffer.device).synchronize()  # the sender may write over it when this returns

    def _arrived(self, name: str, tensor: Tensor) -> bool:
        place = self.places[name]
        part = tensor.as_strided(place.target.shape, place.stride, tensor.storage_offset() + place.offset)
        return torch.equal(place.target, part.to(place.target.device))

    def finish(self) -> dict[str, str]:
        assert self._receiver is not None
        assert self._plan is not None, "finish before begin"
        if self._plan.staged:
            for index in range(len(self._plan.buckets)):
                self.receive(index)
        self._receiver.close()
        self._plan = None
        return dict(self._sums)

    def abort(self) -> None:
        self._plan = None
        if self._receiver is not None:
            self._receiver.close()

    def dispose(self) -> None:
        self.abort()
        if self._receiver is not None:
            self._receiver.dispose()
        self._receiver, self._transport = None, ""
