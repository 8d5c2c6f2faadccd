"""The trainer's part in a publish: gathers shards bucket by bucket, and sends them from rank 0."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from miles.config.run_config import RunConfig
from miles.train.hf_weights import HFWeights
from miles.train.mesh import Ranks
from miles.train.model import TrainedModel
from miles.train.published import PublishedWeights
from miles.train.sharding import full
from miles.types import PublishPlan
from miles.weights.buckets import NamedShape
from miles.weights.checksum import checksum, kind_for
from miles.weights.sender import WeightPublisher


class Publisher:
    """All ranks call every method, in the same order. No rank but the one that stages holds more than a bucket of full tensors."""

    def __init__(
        self, model: TrainedModel, args: RunConfig, dtype: torch.dtype, ranks: Ranks, published: PublishedWeights | None = None
    ) -> None:
        """`published`: where the weights of each publish are kept."""
        self.ranks, self.dtype, self.published = ranks, dtype, published
        self._weights = HFWeights(model)
        shapes: list[NamedShape] = [(name, dtype, shape) for name, shape in self._weights.shapes.items()]
        self._publisher = WeightPublisher(shapes, args, ranks.device)
        self._version: int | None = None
        self._kept: dict[str, Tensor] | None = None
        # a copy of all weights is worth its memory from the second publish on: before the first training step nobody decodes,
        # and the memory that training needs is not taken yet
        self._stage, self._may_stage = False, args.stage_weights and not args.colocate

    def plan(self, version: int, num_receivers: int, one_host: bool, again: bool = False) -> PublishPlan:
        """`again`: it is the last publish's version, whose weights are sent if they are kept."""
        self._version, self._kept = version, self.published.hf() if self.published and again else None
        if self.ranks.rank == 0:
            return self._publisher.plan(version, num_receivers=num_receivers, one_host=one_host, stage=self._stage)
        return PublishPlan(version, "", self._publisher.buckets, (), {}, "")

    @property
    def version(self) -> int:
        """Of the publish that is open."""
        assert self._version is not None, "no publish is open"
        return self._version

    def send_bucket(self, index: int) -> None:
        tensors = self._gather([spec.name for spec in self._publisher.buckets[index]])
        if self.ranks.rank == 0:
            self._publisher.send_bucket(index, tensors)
        else:
            for _ in tensors:
                pass

    def _gather(self, names: list[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            # shards travel in the type of the wire: half the bytes for bfloat16, and the same rounding
            yield name, full(self._weights.shard(name, self.dtype, self._kept)).to(self.ranks.device)

    def end(self) -> tuple[int, dict[str, str]]:
        """The version that was published, and rank 0's checksums."""
        assert self._version is not None, "no publish is open"
        if self.published is not None and self._kept is None:
            self.published.refresh()
        version, self._version, self._kept = self._version, None, None
        checksums = self._publisher.checksums() if self.ranks.rank == 0 else {}
        self._publisher.close()
        self._stage = self._may_stage
        return version, checksums

    def abort(self) -> None:
        self._version = self._kept = None
        self._publisher.close()

    def checksum_all(self) -> dict[str, str]:
        kind = kind_for(self.ranks.device)
        sums = {}
        for name, tensor in self._gather(list(self._weights.shapes)):
            if self.ranks.rank == 0:
                sums[name] = checksum(tensor, kind)
        return sums

    def dispose(self) -> None:
        self._publisher.dispose()
