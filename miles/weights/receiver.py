"""An engine's end of a publish: check the plan, copy in place, checksum what is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from miles.protocols import WeightReceiver
from miles.types import PublishPlan
from miles.weights.buckets import dtype_of, view_of
from miles.weights.checksum import checksums
from miles.weights.moves import Moves
from miles.weights.transports import make_receiver

Write = Callable[[Sequence[tuple[str, Tensor]]], None]
"""Puts full tensors, by name, where they belong; they are gone when it has returned."""


class WeightLoader:
    """Writes published weights into an engine's live parameters. Lives as long as the engine.

    One publish is: begin, then receive for each bucket in order, then finish, which takes what a staged plan has ready; or abort
    at any point. After an abort or an error the parameters may be of two versions, and nothing may be served until a whole publish
    succeeded.
    """

    def __init__(self, parameters: Mapping[str, Tensor], timeout: float = 600.0, write: Write | None = None) -> None:
        """
        Args:
            parameters: Hugging Face state-dict name -> live parameter. Tied weights once, under one of their names.
            timeout: seconds that a transport waits for the other end.
            write: how received tensors get into the parameters; default: each is copied.
        """
        self._parameters = dict(parameters)
        self._write = write or self._copy
        self._plain = write is None
        self._timeout = timeout
        self._plan: PublishPlan | None = None
        self._receiver: WeightReceiver | None = None
        self._transport = ""
        self._next = 0
        self._moves: Moves | None = None
        self._moves_of: tuple[Any, ...] = ()  # memory on both ends

    def begin(self, plan: PublishPlan, receiver_rank: int) -> None:
        """Check that the plan fits the parameters, before any byte moves, and open the transport.

        Raises:
            ValueError: names the tensors that are unknown, missing, or of another shape or type.
        """
        self.abort()
        self._check(plan)
        if plan.transport != self._transport:
            self.dispose()
            device = next(iter(self._parameters.values())).device
            self._receiver, self._transport = make_receiver(plan.transport, device, self._timeout), plan.transport
        assert self._receiver is not None
        self._receiver.open(plan, receiver_rank)
        self._plan, self._next = plan, 0
        if plan.staged and plan.checksum and self._plain:
            self._prepare(plan)
        else:
            self._moves, self._moves_of = None, ()

    def _prepare(self, plan: PublishPlan) -> None:
        """Once for as long as both ends keep their memory: engines decode meanwhile."""
        memory = (plan.transport, plan.channel, plan.buckets, plan.checksum, [tensor.data_ptr() for tensor in self._parameters.values()])
        if memory != self._moves_of:
            buffers = [self._open()[1].receive(index) for index in range(len(plan.buckets))]
            pairs = {
                name: (source, self._parameters[name])
                for index, buffer in enumerate(buffers)
                for name, source in self._tensors(buffer, index)
            }
            self._moves, self._moves_of = Moves(pairs, plan.checksum), memory

    @torch.no_grad()
    def receive(self, index: int) -> None:
        """Receive one bucket and copy it into the parameters."""
        assert index == self._next, f"bucket {self._next} is next, not {index}"
        buffer = self._open()[1].receive(index)
        self._write(self._tensors(buffer, index))
        if buffer.is_cuda:
            torch.cuda.current_stream(buffer.device).synchronize()  # the sender may write over it when this returns
        self._next += 1

    def _copy(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            self._parameters[name].copy_(tensor)

    def _tensors(self, buffer: Tensor, index: int) -> list[tuple[str, Tensor]]:
        return [(spec.name, view_of(buffer, spec)) for spec in self._open()[0].buckets[index]]

    def finish(self) -> dict[str, str]:
        """Checksum by name of the live parameters themselves, read again after the copy; {} when the plan asks for none."""
        plan, receiver = self._open()
        if self._moves is not None:
            sums = self._moves.run()
            self._end(receiver)
            return sums
        for index in range(self._next, len(plan.buckets) if plan.staged else 0):
            self.receive(index)
        if self._next != len(plan.buckets):
            raise ValueError(f"only {self._next} of {len(plan.buckets)} buckets of weight version {plan.version} were received")
        self._end(receiver)
        if not plan.checksum:
            return {}
        return checksums({spec.name: self._parameters[spec.name] for bucket in plan.buckets for spec in bucket}, plan.checksum)

    def _end(self, receiver: WeightReceiver) -> None:
        receiver.close()
        self._plan = None

    def abort(self) -> None:
        """End a publish that failed. Idempotent."""
        self._plan = None
        if self._receiver is not None:
            self._receiver.close()

    def dispose(self) -> None:
        """Abort, and let go of the transport. Idempotent."""
        self.abort()
        self._moves, self._moves_of = None, ()
        if self._receiver is not None:
            self._receiver.dispose()
        self._receiver, self._transport = None, ""

    def _open(self) -> tuple[PublishPlan, WeightReceiver]:
        assert self._plan is not None, "no publish is open: begin() comes first"
        assert self._receiver is not None
        return self._plan, self._receiver

    def _check(self, plan: PublishPlan) -> None:
        specs = {spec.name: spec for bucket in plan.buckets for spec in bucket}
        faults = [f"{name} is unknown here" for name in specs if name not in self._parameters]
        faults += [f"{name} is not sent" for name in self._parameters if name not in specs]
        for name, spec in specs.items():
            own = self._parameters.get(name)
            if own is not None and (tuple(own.shape), own.dtype) != (spec.shape, dtype_of(spec)):
                faults.append(f"{name} is {spec.dtype} {spec.shape} on the wire and {own.dtype} {tuple(own.shape)} here")
        if faults:
            more = f" and {len(faults) - 8} more" if len(faults) > 8 else ""
            raise ValueError(f"weight version {plan.version} does not fit this engine: {'; '.join(faults[:8])}{more}")
