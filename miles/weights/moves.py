"""Tensors put into place, and proved there, in one pass over memory where that can be."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xxhash
from torch import Tensor

from miles.weights.checksum import FUSED, as_bytes, checksum

if FUSED:
    from miles.weights.checksum_triton import WordPass

_CHUNK = 1 << 20  # bytes that a core's cache still has when they are summed


class Moves:
    """Copies that are prepared before they are wanted.

    Args:
        pairs: name -> (source, target), of one shape and type. Both stay where they are.
        kind: of the checksums.
    """

    def __init__(self, pairs: Mapping[str, tuple[Tensor, Tensor]], kind: str) -> None:
        self._pairs = {name: (source.detach(), target.detach()) for name, (source, target) in pairs.items()}
        self._kind = kind
        self._words = {name: tuple(map(_words, pair)) for name, pair in self._pairs.items() if kind == "mix64" and _has_words(*pair)}
        self._pass = None
        if self._words:
            sources, targets = zip(*self._words.values(), strict=True)
            self._pass = WordPass(targets, sources)

    def run(self) -> dict[str, str]:
        """Copy. Returns the checksum by name of what the targets hold then, as `checksum` gives it."""
        sums = {}
        if self._pass is not None:
            for (name, (_, words)), total in zip(self._words.items(), self._pass.run(), strict=True):
                sums[name] = f"{(total + 8 * words.numel()) % (1 << 64):016x}"
        for name, (source, target) in self._pairs.items():
            if name not in self._words:
                sums[name] = _moved(source, target, self._kind)
        return {name: sums[name] for name in self._pairs}


def _has_words(source: Tensor, target: Tensor) -> bool:
    """Whether the kernel can take them: whole words on one GPU."""
    if not FUSED or not source.is_cuda or source.device != target.device or source.nbytes % 8:
        return False
    return all(tensor.is_contiguous() and tensor.data_ptr() % 8 == 0 for tensor in (source, target))


def _words(tensor: Tensor) -> Tensor:
    return as_bytes(tensor).view(torch.int64)


def _moved(source: Tensor, target: Tensor, kind: str) -> str:
    if kind != "xxh3_64" or source.is_cuda or target.is_cuda or not (source.is_contiguous() and target.is_contiguous()):
        target.copy_(source)
        return checksum(target, kind)
    digest, data, place = xxhash.xxh3_64(), as_bytes(source), as_bytes(target)
    for begin in range(0, len(data), _CHUNK):
        chunk = place[begin : begin + _CHUNK]
        chunk.copy_(data[begin : begin + _CHUNK])
        digest.update(chunk.numpy().data)
    return digest.hexdigest()
