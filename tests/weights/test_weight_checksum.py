"""Checksums: the value, and that every change of a byte or of its place shows."""

import hypothesis.strategies as st
import pytest
import torch
import xxhash
from hypothesis import given, settings

from miles.weights.checksum import _CHUNK_WORDS, checksum, kind_for

KINDS = ["xxh3_64", "mix64"]
MASK = (1 << 64) - 1


def mix64_reference(data: bytes) -> str:
    """The definition, in plain integers."""
    total = len(data)
    padded = data + bytes(-len(data) % 8)
    for place in range(len(padded) // 8):
        value = (int.from_bytes(padded[place * 8 : place * 8 + 8], "little") + place * 0x9E3779B97F4A7C15) & MASK
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
        value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
        total += value ^ value >> 31
    return f"{total & MASK:016x}"


@given(st.binary(max_size=200))
def test_values_are_those_of_the_definitions(data: bytes) -> None:
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)
    assert checksum(tensor, "mix64") == mix64_reference(data)
    assert checksum(tensor, "xxh3_64") == xxhash.xxh3_64_hexdigest(data)


def test_chunks_do_not_show() -> None:
    size = _CHUNK_WORDS["cpu"] * 8 * 2 + 13
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert checksum(data, "mix64") == mix64_reference(bytes(data.tolist()))


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_values_in_row_major_order_count(kind: str) -> None:
    tensor = torch.randn(6, 10)
    assert checksum(tensor.t().contiguous().t(), kind) == checksum(tensor, kind)
    wide = torch.zeros(6, 21, dtype=torch.uint8)
    wide[:, 1:11] = torch.arange(60).view(6, 10)
    assert checksum(wide[:, 1:11], kind) == checksum(torch.arange(60, dtype=torch.uint8), kind)
    assert checksum(wide.view(-1)[1:9], kind) == checksum(wide.view(-1)[1:9].clone(), kind), "not aligned to words"
    assert checksum(torch.nn.Parameter(tensor), kind) == checksum(tensor, kind)
    assert checksum(torch.tensor(3.0), kind) == checksum(torch.tensor([3.0]), kind)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150)
@given(data=st.binary(min_size=1, max_size=100), place=st.integers(0, 99), bit=st.integers(0, 7))
def test_a_flipped_bit_shows(kind: str, data: bytes, place: int, bit: int) -> None:
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    other = tensor.clone()
    other[place % len(data)] ^= 1 << bit
    assert checksum(tensor, kind) != checksum(other, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_elements_and_rows_that_change_places_show(kind: str, dtype: torch.dtype) -> None:
    tensor = torch.arange(96).view(12, 8).to(dtype)
    one = tensor.clone()
    one[[3, 7]] = one[[7, 3]]
    two = tensor.clone().view(-1)
    two[[10, 11]] = two[[11, 10]]
    values = {checksum(each, kind) for each in (tensor, one, two, tensor.flip(0), tensor.roll(1, 1), tensor.t())}
    assert len(values) == 6


@pytest.mark.parametrize("kind", KINDS)
def test_length_and_sign_of_zero_count(kind: str) -> None:
    assert len({checksum(torch.zeros(n), kind) for n in range(20)}) == 20
    assert checksum(torch.tensor([0.0]), kind) != checksum(torch.tensor([-0.0]), kind)


def test_which_kind() -> None:
    assert kind_for(torch.device("cpu")) == "xxh3_64"
    assert kind_for(torch.device("cuda", 1)) == "mix64"
    with pytest.raises(ValueError, match="crc"):
        checksum(torch.zeros(1), "crc")
