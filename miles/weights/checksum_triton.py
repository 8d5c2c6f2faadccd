"""The sums of mix64 in one pass over memory and one launch for any number of tensors. Imported only where Triton is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Words that one program sums."""

_STRIDE = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _mix(addresses, lengths, owners, first_blocks, sums, block_words: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    block = tl.program_id(0).to(tl.int64)
    owner = tl.load(owners + block)
    words = tl.load(addresses + owner).to(tl.pointer_type(tl.int64))
    place = (block - tl.load(first_blocks + owner)) * block_words + tl.arange(0, block_words)
    there = place < tl.load(lengths + owner)
    x = tl.load(words + place, mask=there, other=0).to(tl.uint64, bitcast=True) + place.to(tl.uint64) * _STRIDE
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    x = x ^ (x >> 31)
    total = tl.sum(tl.where(there, x, 0).to(tl.int64, bitcast=True), 0)
    tl.atomic_add(sums + owner, total)


def sums_of_words(parts: Sequence[Tensor]) -> list[int]:
    """For each int64 tensor of one device, the sum modulo 2^64 that `checksum._mix_words` makes from its first word on."""
    device = parts[0].device
    lengths = torch.tensor([part.numel() for part in parts])
    blocks = (lengths + BLOCK - 1) // BLOCK
    owners = torch.repeat_interleave(blocks)  # [blocks] index of the tensor that each is of
    sums = torch.zeros(len(parts), dtype=torch.int64, device=device)
    if len(owners):
        addresses = torch.tensor([part.data_ptr() for part in parts])
        tables = [table.to(device) for table in (addresses, lengths, owners, blocks.cumsum(0) - blocks)]
        _mix[(len(owners),)](*tables, sums, block_words=BLOCK)
    return [value % (1 << 64) for value in sums.tolist()]
