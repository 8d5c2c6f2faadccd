"""Sums over the tokens of each sample, for quantities that belong to a whole sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segments:
    """Which sample each of the tokens at hand belongs to. All trained tokens of a sample must be at hand.

    Example: Segments.of(tensor([7, 7, 3])).spread(Segments.sum(values)) gives every token the sum of its sample.
    """

    order: Tensor  # int64 [tokens] places of the tokens, sample by sample
    index: Tensor  # int64 [tokens] which sample, 0 .. samples - 1, ascending by id
    counts: Tensor  # int64 [samples]

    @classmethod
    def of(cls, sample_of: Tensor) -> Segments:
        """sample_of: int64 [tokens], any ids, in any order."""
        _, index, counts = torch.unique(sample_of, return_inverse=True, return_counts=True)
        return cls(torch.argsort(index, stable=True), index, counts)

    def __len__(self) -> int:
        return len(self.counts)

    @torch.no_grad()
    def sum(self, values: Tensor) -> Tensor:
        """[tokens] -> float64 [samples]. Adds in one order on every device, unlike index_add."""
        if not len(self):  # segment_reduce wants at least one
            return values.new_zeros(0, dtype=torch.float64)
        return torch.segment_reduce(values.double()[self.order], "sum", lengths=self.counts)

    @torch.no_grad()
    def mean(self, values: Tensor) -> Tensor:
        """[tokens] -> float64 [samples]."""
        return self.sum(values) / self.counts

    def all(self, values: Tensor) -> Tensor:
        """bool [tokens] -> bool [samples]."""
        return self.sum(values) == self.counts

    def any(self, values: Tensor) -> Tensor:
        """bool [tokens] -> bool [samples]."""
        return self.sum(values) > 0

    def spread(self, by_sample: Tensor) -> Tensor:
        """[samples] -> [tokens]."""
        return by_sample[self.index]
