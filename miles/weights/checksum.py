"""Checksums of tensors, equal on both ends of a publish.

Both kinds depend on every byte and on its place, so a flipped bit, two elements that changed places, and two tensors
that changed places are all found. Type and shape are not in them: the publish plan is compared for those.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Literal

import torch
import xxhash
from torch import Tensor

FUSED = find_spec("triton") is not None and any(map(shutil.which, ("cc", "gcc", "clang")))
"""Triton comes with torch for GPUs, and needs a C compiler. The sums are the same without, at a tenth of the speed."""
if FUSED:
    from miles.weights.checksum_triton import WordPass

Kind = Literal["xxh3_64", "mix64"]

_CHUNK_WORDS = {"cpu": 1 << 15, "cuda": 1 << 23}  # a chunk and its temporaries stay in a core's cache, or fill a GPU


def kind_for(device: torch.device) -> Kind:
    """xxh3_64 is the fastest on CPU; mix64 is as fast as memory on a GPU, and gives the same value everywhere."""
    return "mix64" if device.type == "cuda" else "xxh3_64"


def checksum(tensor: Tensor, kind: str) -> str:
    """16 hexadecimal digits for the tensor's bytes in row-major order, whatever its strides and device."""
    data = as_bytes(tensor)
    if kind == "xxh3_64":
        return xxhash.xxh3_64_hexdigest(data.cpu().numpy().data)
    if kind == "mix64":
        return f"{_mix64(data):016x}"
    raise ValueError(f"unknown checksum {kind!r}; known are xxh3_64 and mix64")


def checksums(tensors: Mapping[str, Tensor], kind: str) -> dict[str, str]:
    """`checksum` of each; those on a GPU in one launch."""
    if kind == "mix64" and FUSED and tensors and all(tensor.is_cuda for tensor in tensors.values()):
        data = {name: as_bytes(tensor) for name, tensor in tensors.items()}
        sums = WordPass([_words(part) for part in data.values()]).run()
        return {name: f"{(total + _rest(part)) % (1 << 64):016x}" for (name, part), total in zip(data.items(), sums, strict=True)}
    return {name: checksum(tensor, kind) for name, tensor in tensors.items()}


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's bytes as flat uint8, without a copy when it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _signed(value: int) -> int:
    """A 64-bit pattern as the int64 that torch takes."""
    return value - (1 << 64) if value >= 1 << 63 else value


_STRIDE = _signed(0x9E3779B97F4A7C15)  # odd, from the golden ratio: spreads neighbouring places over all 64 bits
_FIRST = _signed(0xBF58476D1CE4E5B9)  # the two multipliers and shifts of splitmix64's finaliser
_SECOND = _signed(0x94D049BB133111EB)


def _mix64(data: Tensor) -> int:
    """Sum modulo 2^64, over the 8-byte words, of splitmix64's finaliser of (word + place x stride).

    The finaliser is a bijection, so one changed word always changes the sum. A sum does not depend on the order in
    which chunks or threads are added, so CPU and CUDA agree to the last bit.
    """
    words = _words(data)
    return ((_mix_words(words, first=0) if len(words) else 0) + _rest(data)) % (1 << 64)


def _words(data: Tensor) -> Tensor:
    """The whole 8-byte words of flat bytes, int64."""
    body = data[: data.numel() // 8 * 8]
    return (body.clone() if body.data_ptr() % 8 else body).view(torch.int64)


def _rest(data: Tensor) -> int:
    """What bytes behind the last whole word add, and the length: trailing zero bytes count."""
    size = data.numel()
    if not size % 8:
        return size
    tail = torch.zeros(8, dtype=torch.uint8, device=data.device)
    tail[: size % 8] = data[size // 8 * 8 :]
    return size + _mix_words(tail.view(torch.int64), first=size // 8)


def _mix_words(words: Tensor, first: int) -> int:
    step = min(_CHUNK_WORDS.get(words.device.type, 1 << 20), len(words))
    places = torch.arange(step, dtype=torch.int64, device=words.device).mul_(_STRIDE)  # wraps modulo 2^64, as all below
    mixed, shifted = torch.empty_like(places), torch.empty_like(places)
    sums = []
    for start in range(0, len(words), step):
        n = min(step, len(words) - start)
        value, shift = mixed[:n], shifted[:n]
        torch.add(words[start : start + n], places[:n], out=value)
        value += _signed((first + start) * 0x9E3779B97F4A7C15 % (1 << 64))
        _xor_shifted(value, shift, 30)
        value *= _FIRST
        _xor_shifted(value, shift, 27)
        value *= _SECOND
        _xor_shifted(value, shift, 31)
        sums.append(value.sum())
    return int(torch.stack(sums).sum().item())


def _xor_shifted(value: Tensor, scratch: Tensor, bits: int) -> None:
    """value ^= value >> bits, with the logical shift that torch lacks for int64."""
    torch.bitwise_right_shift(value, bits, out=scratch)
    scratch &= (1 << (64 - bits)) - 1
    value ^= scratch
