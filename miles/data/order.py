"""The order in which rows are drawn: shuffled epochs, mixes by weight, easiest first. All of it determined by numbers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SET_SEED = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Order:
    """Which row each draw of an epoch takes. An epoch has as many draws as there are rows.

    Without weights each row comes once an epoch. With weights every epoch holds each set's share of draws, spread over
    the epoch, and each set is walked through in passes of its own: what an epoch leaves out comes first in the next.
    """

    sizes: tuple[int, ...]  # rows of each set; row numbers run through all sets
    seed: int
    shuffle: bool = True
    weights: tuple[float, ...] | None = None

    def epoch(self, epoch: int, difficulty: np.ndarray | None = None) -> np.ndarray:
        """Row numbers in the order of their draws, int64 [rows]. `difficulty` float64 [rows]: the lowest comes first."""
        if self.weights is None:
            return self._walk(0, sum(self.sizes), self.seed, epoch, difficulty)
        quotas = self.quotas()
        pattern = self._pattern(quotas, epoch)
        rows = np.empty(len(pattern), np.int64)
        for number, quota in enumerate(quotas):
            rows[pattern == number] = self._share(number, quota, epoch, difficulty)
        return rows

    def quotas(self) -> list[int]:
        """Draws of each set in one epoch: largest remainders, so that they sum to the number of rows."""
        assert self.weights is not None
        total = sum(self.sizes)
        exact = [total * weight / sum(self.weights) for weight in self.weights]
        quotas = [int(share) for share in exact]
        by_rest = sorted(range(len(exact)), key=lambda number: (quotas[number] - exact[number], number))
        for number in by_rest[: total - sum(quotas)]:
            quotas[number] += 1
        return quotas

    def _pattern(self, quotas: Sequence[int], epoch: int) -> np.ndarray:
        """The set of each draw, int64 [rows]."""
        sets = np.repeat(np.arange(len(quotas)), quotas)
        if self.shuffle:
            return sets[epoch_order(len(sets), self.seed, epoch)]
        places = np.concatenate([(np.arange(quota) + 0.5) / quota for quota in quotas if quota])
        return sets[np.argsort(places, kind="stable")]

    def _share(self, number: int, quota: int, epoch: int, difficulty: np.ndarray | None) -> np.ndarray:
        size, first = self.sizes[number], sum(self.sizes[:number])
        seed = (self.seed + SET_SEED * (number + 1)) % 2**64
        draws = np.arange(epoch * quota, (epoch + 1) * quota)
        passes = (
            [self._walk(first, size, seed, walk, difficulty) for walk in range(draws[0] // size, draws[-1] // size + 1)] if quota else []
        )
        return np.concatenate(passes)[draws - draws[0] // size * size] if passes else draws

    def _walk(self, first: int, size: int, seed: int, walk: int, difficulty: np.ndarray | None) -> np.ndarray:
        """One pass over a set; equally hard rows stay in the order they would have had."""
        order = epoch_order(size, seed, walk) if self.shuffle else np.arange(size)
        if difficulty is not None:
            order = order[np.argsort(difficulty[first : first + size][order], kind="stable")]
        return order + first


def epoch_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation of one epoch, int64 [rows]: rows sorted by a hash of (seed, epoch, row).

    Our own hash (splitmix64), because numpy's generators may change their streams between versions and a resumed run
    must find the order that it left.
    """
    start = _mix(_mix(np.asarray([seed % 2**64], np.uint64)) ^ np.asarray([epoch], np.uint64))
    keys = _mix(start ^ _mix(np.arange(rows, dtype=np.uint64)))
    return np.argsort(keys, kind="stable")


def _mix(values: np.ndarray) -> np.ndarray:
    """splitmix64 (Steele, Lea, Flood 2014); uint64 arithmetic wraps."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
