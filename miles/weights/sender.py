"""The trainer's end of a publish: plan, fill, send, checksum."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from miles.config.run_config import RunConfig
from miles.protocols import WeightSender
from miles.types import PublishPlan
from miles.weights.buckets import NamedShape, nbytes_of, plan_buckets, view_of
from miles.weights.checksum import checksums, kind_for
from miles.weights.transports import choose, make_sender

logger = logging.getLogger(__name__)


class WeightPublisher:
    """Sends a model's weights to the engines, one bucket at a time. Lives as long as the trainer.

    All ranks may construct one, for `buckets` tells which tensors to gather next; only the rank that sends calls the
    rest. One publish is: plan, then send_bucket for each bucket in order, then checksums, then close (also after a
    failure, at any point).
    """

    def __init__(self, named_shapes: Sequence[NamedShape], args: RunConfig, device: torch.device | str = "cpu") -> None:
        """
        Args:
            named_shapes: every tensor to send, in the order of the model: name, type on the wire, full shape.
            args: settings.
            device: where the trainer's full tensors are.
        """
        self.buckets = plan_buckets(named_shapes, args.weight_bucket_mb << 20)
        self._args = args
        self._device = torch.device(device)
        self._sender: WeightSender | None = None
        self._way: tuple[str, bool] | None = None
        self._plan: PublishPlan | None = None
        self._next = 0
        self._checksums: dict[str, str] = {}

    def plan(self, version: int, *, num_receivers: int = 1, one_host: bool = True, stage: bool = False) -> PublishPlan:
        """Open the transport for one publish.

        Args:
            version: the weight version that the engines have when all is done.
            num_receivers: engines that take part, with receiver ranks 0 .. num_receivers - 1.
            one_host: whether trainer and engines share a host, for weight_transport auto.
            stage: have every bucket ready before the engines take the first, where the transport has room for all of them.
        """
        self.close()
        transport, reason = choose(self._args, one_host=one_host, device=self._device)
        if (transport, one_host) != self._way:
            logger.info("weights travel by %s: %s", transport, reason)
            self.dispose()
            self._sender = make_sender(transport, self._args, one_host=one_host, device=self._device)
            self._way = (transport, one_host)
        assert self._sender is not None
        sizes = tuple(nbytes_of(bucket) for bucket in self.buckets)
        channel = self._sender.open(sizes, version, num_receivers, stage)
        self._plan = PublishPlan(
            version=version,
            transport=transport,
            buckets=self.buckets,
            bucket_nbytes=sizes,
            channel=channel,
            checksum=kind_for(self._device) if self._args.verify_weight_updates else "",
            staged=self._sender.staged,
        )
        self._next, self._checksums = 0, {}
        return self._plan

    def send_bucket(self, index: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Fill and send one bucket. Bucket i may be sent once bucket i - 2 was received everywhere; of a staged plan at once.

        Args:
            index: buckets go in order.
            tensors: the full tensors of this bucket, any order, any floating type where the wire's is one.

        Raises:
            ValueError: a tensor is missing, unknown, or does not fit the plan; it is named.
        """
        assert self._plan is not None, "no publish is open: plan() comes first"
        assert self._sender is not None
        assert index == self._next, f"bucket {self._next} is next, not {index}"
        buffer = self._sender.buffer(index)
        specs = {spec.name: spec for spec in self.buckets[index]}
        written: dict[str, Tensor] = {}
        for name, tensor in tensors:
            spec = specs.pop(name, None)
            if spec is None:
                raise ValueError(f"weight {name!r} does not belong to bucket {index}, or came twice")
            target = view_of(buffer, spec)
            if tensor.shape != target.shape:
                raise ValueError(f"weight {name!r} has shape {tuple(tensor.shape)}, planned was {spec.shape}")
            if tensor.dtype != target.dtype and not (tensor.is_floating_point() and target.is_floating_point()):
                raise ValueError(f"weight {name!r} is {tensor.dtype} and cannot travel as {spec.dtype}")
            written[name] = _written(target, tensor.detach())
        if specs:
            raise ValueError(f"bucket {index} lacks {', '.join(specs)}")
        if self._plan.checksum and not self._sums_at_the_end(self._plan):
            self._checksums |= checksums({spec.name: written[spec.name] for spec in self.buckets[index]}, self._plan.checksum)
        self._sender.send(index)
        self._next += 1

    def checksums(self) -> dict[str, str]:
        """Checksum by tensor name of what was sent, in the order sent; {} when verification is off."""
        assert self._plan is not None, "no publish is open: plan() comes first"
        assert self._next == len(self.buckets), f"{self._next} of {len(self.buckets)} buckets were sent"
        if self._sums_at_the_end(self._plan):
            assert self._sender is not None
            places = [(spec, self._sender.buffer(index)) for index, bucket in enumerate(self.buckets) for spec in bucket]
            return checksums({spec.name: view_of(buffer, spec) for spec, buffer in places}, self._plan.checksum)
        return dict(self._checksums)

    @staticmethod
    def _sums_at_the_end(plan: PublishPlan) -> bool:
        """Whether all of a GPU's staged buckets are summed at once: each wait for a GPU that decodes meanwhile is a long one."""
        return plan.staged and plan.checksum == "mix64"

    def close(self) -> None:
        """End a publish, good or bad. Idempotent."""
        self._plan = None
        if self._sender is not None:
            self._sender.close()

    def dispose(self) -> None:
        """Close, and leave nothing behind: segments, sockets, files. Idempotent."""
        self.close()
        if self._sender is not None:
            self._sender.dispose()
        self._sender, self._way = None, None


def _written(target: Tensor, tensor: Tensor) -> Tensor:
    """Write a tensor to where it is sent from. Returns what its checksum is to be taken of: the type of the wire, where that is fast."""
    if tensor.device == target.device:
        target.copy_(tensor)
        return target
    converted = tensor.to(target.dtype)  # a GPU converts and sums in no time, and the wire carries less
    target.copy_(converted)
    return converted
