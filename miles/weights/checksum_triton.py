"""The sums of mix64 in one pass over memory and one launch for any number of tensors. Imported only where Triton is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024
"""Words that one program has in registers at a time."""
TILES = 16
"""And how often it takes so many."""
WARPS = 4

STRIDE = 0x9E3779B97F4A7C15
_STRIDE = tl.constexpr(STRIDE)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _mix(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    sources,
    targets,
    lengths,
    owners,
    first_blocks,
    sums,
    copy: tl.constexpr,
    wide: tl.constexpr,
    tile: tl.constexpr,
    tiles: tl.constexpr,
    step: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    owner = tl.load(owners + block)
    length = tl.load(lengths + owner)
    target = tl.load(targets + owner).to(tl.pointer_type(tl.int64))
    source = tl.load(sources + owner).to(tl.pointer_type(tl.int64))
    if wide:  # 16 bytes at a time
        length, target, source = tl.multiple_of(length, 2), tl.multiple_of(target, 16), tl.multiple_of(source, 16)
    first = (block - tl.load(first_blocks + owner)) * (tile * tiles)
    inside = tl.arange(0, tile)
    spread = (first + inside).to(tl.uint64) * _STRIDE
    total = tl.zeros((tile,), tl.int64)
    for index in range(tiles):
        place = first + index * tile + inside
        there = place < length
        if copy:
            tl.store(target + place, tl.load(source + place, mask=there, other=0), mask=there)
        # volatile: what lies in memory now, not what was in the registers
        word = tl.load(target + place, mask=there, other=0, volatile=copy)
        x = word.to(tl.uint64, bitcast=True) + spread
        x = (x ^ (x >> 30)) * _FIRST
        x = (x ^ (x >> 27)) * _SECOND
        x = x ^ (x >> 31)
        total += tl.where(there, x, 0).to(tl.int64, bitcast=True)
        spread += step
    tl.atomic_add(sums + owner, tl.sum(total, 0))


class WordPass:
    """One launch over the int64 words of tensors of one device. Its tables are made once; it may run many times.

    Args:
        words: what is summed.
        sources: what is copied there before, as many words each; None: nothing is.
    """

    def __init__(self, words: Sequence[Tensor], sources: Sequence[Tensor] | None = None) -> None:
        self._keep = (list(words), list(sources or ()))  # the tables have their addresses
        self._copy = sources is not None
        lengths = [part.numel() for part in words]
        targets = [part.data_ptr() for part in words]
        origins = targets if sources is None else [part.data_ptr() for part in sources]
        self._wide = all(length % 2 == 0 for length in lengths) and all(address % 16 == 0 for address in targets + origins)
        sizes = torch.tensor(lengths)
        blocks = (sizes + TILE * TILES - 1) // (TILE * TILES)
        owners = torch.repeat_interleave(blocks)  # [blocks] index of the tensor that each is of
        tables = (torch.tensor(origins), torch.tensor(targets), sizes, owners, blocks.cumsum(0) - blocks)
        self._num_blocks, self._device = len(owners), words[0].device
        self._tables = [table.to(self._device) for table in tables]

    def run(self) -> list[int]:
        """For each tensor, the sum modulo 2^64 that `checksum._mix_words` makes from its first word on."""
        sums = torch.zeros(len(self._tables[0]), dtype=torch.int64, device=self._device)
        if self._num_blocks:
            sizes = {"tile": TILE, "tiles": TILES, "step": TILE * STRIDE % (1 << 64), "num_warps": WARPS}
            _mix[(self._num_blocks,)](*self._tables, sums, copy=self._copy, wide=self._wide, **sizes)
        return [value % (1 << 64) for value in sums.tolist()]
