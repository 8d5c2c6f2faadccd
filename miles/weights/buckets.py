"""Which tensor travels in which bucket, and where in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from miles.types import TensorSpec

ALIGNMENT = 16
NamedShape = tuple[str, torch.dtype, Sequence[int]]
"""A tensor on the wire: its Hugging Face state-dict name, the type it travels in, its shape."""


def plan_buckets(named_shapes: Iterable[NamedShape], bucket_nbytes: int) -> tuple[tuple[TensorSpec, ...], ...]:
    """Tensors in the order given, as many to a bucket as fit; one that is larger than a bucket has one of its own.

    Raises:
        ValueError: a name comes twice.
    """
    buckets: list[tuple[TensorSpec, ...]] = []
    current: list[TensorSpec] = []
    seen: set[str] = set()
    end = 0
    for name, dtype, shape in named_shapes:
        if name in seen:
            raise ValueError(f"weight {name!r} is listed twice")
        seen.add(name)
        nbytes = dtype.itemsize * torch.Size(shape).numel()
        if current and _aligned(end) + nbytes > bucket_nbytes:
            buckets.append(tuple(current))
            current, end = [], 0
        spec = TensorSpec(name, str(dtype).removeprefix("torch."), tuple(shape), _aligned(end), nbytes)
        current.append(spec)
        end = spec.offset + nbytes
    if current:
        buckets.append(tuple(current))
    return tuple(buckets)


def nbytes_of(bucket: Sequence[TensorSpec]) -> int:
    """Bytes of a bucket: at least one alignment unit, so that a bucket of empty tensors can be mapped and sent too."""
    return max(ALIGNMENT, _aligned(bucket[-1].offset + bucket[-1].nbytes))


def layout(bucket_nbytes: Sequence[int], depth: int) -> tuple[list[int], int]:
    """Where each bucket begins in memory that holds `depth` of them, filled in turn; and how many bytes that is."""
    depth = min(depth, len(bucket_nbytes))
    begins = list(accumulate((max(bucket_nbytes[slot::depth]) for slot in range(depth)), initial=0))
    return [begins[index % depth] for index in range(len(bucket_nbytes))], begins[-1]


def dtype_of(spec: TensorSpec) -> torch.dtype:
    dtype = getattr(torch, spec.dtype)
    assert isinstance(dtype, torch.dtype), spec.dtype
    return dtype


def view_of(buffer: Tensor, spec: TensorSpec) -> Tensor:
    """The tensor that lies in a bucket's flat uint8 buffer, as a view with its own type and shape."""
    return buffer[spec.offset : spec.offset + spec.nbytes].view(dtype_of(spec)).view(spec.shape)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
