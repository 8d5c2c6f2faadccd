"""Buckets, and a publisher and a loader over shared memory in one process."""

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from engine_process import settings, shapes_of
from hypothesis import given
from hypothesis import settings as examples

from miles.weights import shared_memory
from miles.weights.buckets import ALIGNMENT, nbytes_of, plan_buckets
from miles.weights.compare import compare_checksums
from miles.weights.receiver import WeightLoader
from miles.weights.sender import WeightPublisher

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
NAMED_SHAPES = st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), min_size=1, max_size=12).map(
    lambda pairs: [(f"w{index}", dtype, shape) for index, (dtype, shape) in enumerate(pairs)]
)


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random bytes (random bits for bool, where no other byte is a value): NaNs, infinities and all."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8))


@given(NAMED_SHAPES, st.integers(1, 3000))
def test_buckets_hold_every_tensor_once_in_order_aligned_and_apart(named_shapes: list, bucket_nbytes: int) -> None:
    buckets = plan_buckets(named_shapes, bucket_nbytes)
    assert [(spec.name, spec.shape) for bucket in buckets for spec in bucket] == [(name, shape) for name, _, shape in named_shapes]
    for bucket in buckets:
        end = 0
        for spec in bucket:
            assert spec.offset % ALIGNMENT == 0
            assert spec.offset >= end
            end = spec.offset + spec.nbytes
        assert nbytes_of(bucket) >= max(end, 1)
        assert len(bucket) == 1 or end <= bucket_nbytes


def test_a_large_tensor_travels_alone() -> None:
    shapes = [(name, torch.float32, (size,)) for name, size in [("a", 10), ("b", 10), ("big", 1000), ("c", 10), ("d", 10)]]
    assert [[spec.name for spec in bucket] for bucket in plan_buckets(shapes, 200)] == [["a", "b"], ["big"], ["c", "d"]]


def test_a_name_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="'a' is listed twice"):
        plan_buckets([("a", torch.float32, (1,)), ("a", torch.float32, (1,))], 100)


@examples(max_examples=40, deadline=None)
@given(named_shapes=NAMED_SHAPES, seed=st.integers(0, 1 << 30))
def test_any_shapes_and_types_arrive_bit_for_bit(named_shapes: list, seed: int) -> None:
    weights = {name: random_tensor(dtype, shape, seed + index) for index, (name, dtype, shape) in enumerate(named_shapes)}
    parameters = {name: torch.zeros(shape, dtype=dtype) for name, dtype, shape in named_shapes}
    publisher, loader = WeightPublisher(named_shapes, settings()), WeightLoader(parameters)
    publisher.buckets = plan_buckets(named_shapes, 300)  # smaller than a MiB, so that there are several
    plan = publisher.plan(1)
    loader.begin(plan, 0)
    for index, bucket in enumerate(plan.buckets):
        publisher.send_bucket(index, [(spec.name, weights[spec.name]) for spec in reversed(bucket)])
        loader.receive(index)
    assert loader.finish() == publisher.checksums()
    publisher.dispose()
    assert all(same_bytes(parameters[name], weights[name]) for name in weights)


@pytest.mark.parametrize("verify", [True, False])
def test_a_staged_publish_is_taken_whole_and_its_memory_stays(verify: bool) -> None:
    shapes = [
        ("a", torch.float32, (300, 1000)),
        ("odd", torch.bfloat16, (7,)),
        ("turned", torch.float32, (40, 50)),
        ("none", torch.int64, (0,)),
    ]
    parameters = {name: torch.zeros(shape, dtype=dtype) for name, dtype, shape in shapes}
    parameters["turned"] = torch.zeros(50, 40).t()
    publisher, loader = WeightPublisher(shapes, settings(verify_weight_updates=verify)), WeightLoader(parameters)
    publisher.buckets = plan_buckets(shapes, 1000)
    channels = []
    for version in (1, 2, 3):
        weights = {name: random_tensor(dtype, shape, version) for name, dtype, shape in shapes}
        plan = publisher.plan(version, stage=True)
        assert plan.staged
        channels.append(plan.channel)
        for index, bucket in enumerate(plan.buckets):
            publisher.send_bucket(index, [(spec.name, weights[spec.name]) for spec in bucket])
        sent = publisher.checksums()
        publisher.close()
        loader.begin(plan, 0)
        assert loader.finish() == sent
        assert bool(sent) == verify
        assert all(same_bytes(parameters[name], weights[name]) for name in weights)
        if version == 2:  # they moved: what was prepared for their old place is prepared anew
            parameters["a"].data = torch.zeros(300, 1000)
    assert channels[0] == channels[1] == channels[2]
    assert not publisher.plan(4).staged
    publisher.dispose()


def test_a_staged_tensor_that_arrives_wrong_is_found() -> None:
    weights = {"a": torch.randn(1 << 19), "b": torch.randn(9)}
    publisher = WeightPublisher(shapes_of(weights), settings())
    loader = WeightLoader({name: torch.zeros_like(weight) for name, weight in weights.items()})
    plan = publisher.plan(1, stage=True)
    for index, bucket in enumerate(plan.buckets):
        publisher.send_bucket(index, [(spec.name, weights[spec.name]) for spec in bucket])
    loader.begin(plan, 0)
    assert publisher._sender is not None
    publisher._sender.buffer(0)[(1 << 21) - 1] ^= 1
    found = compare_checksums(publisher.checksums(), loader.finish())
    assert found.differing == ("a",)
    publisher.dispose()


def test_without_room_two_buckets_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "SHARE", 0.0)
    weights = {name: torch.ones(1 << 18) for name in "abc"}
    publisher = WeightPublisher(shapes_of(weights), settings())
    plan = publisher.plan(1, stage=True)
    assert not plan.staged
    assert plan.channel["begins"] == [0, 1 << 20, 0]
    publisher.dispose()


def sent(weights: dict[str, torch.Tensor], named_shapes: list, parameters: dict[str, torch.Tensor], **values: Any) -> None:
    publisher, loader = WeightPublisher(named_shapes, settings(**values)), WeightLoader(parameters)
    try:
        loader.begin(publisher.plan(1), 0)
        publisher.send_bucket(0, weights.items())
        loader.receive(0)
        assert loader.finish() == publisher.checksums()
    finally:
        publisher.dispose()


@pytest.mark.parametrize("transport", ["shared_memory", "disk"])
def test_the_master_type_becomes_the_type_of_the_wire(transport: str, tmp_path: Any) -> None:
    weights = {"a": torch.nn.Parameter(torch.randn(30, 20)), "b": torch.randn(20, 30).t()}
    parameters = {name: torch.nn.Parameter(torch.zeros(30, 20, dtype=torch.bfloat16)) for name in weights}
    shapes = [(name, torch.bfloat16, (30, 20)) for name in weights]
    sent(weights, shapes, parameters, weight_transport=transport, weight_sync_dir=str(tmp_path))
    assert all(torch.equal(parameters[name], weights[name].bfloat16()) for name in weights)
    assert all(parameter.requires_grad for parameter in parameters.values())


def test_parameters_of_any_layout_are_written_in_place() -> None:
    whole = torch.zeros(8, 6)
    parameters = {"columns": whole[:, ::2], "other": whole[:, 1]}
    weights = {"columns": torch.randn(8, 3), "other": torch.randn(8)}
    sent(weights, shapes_of(weights), parameters)
    assert torch.equal(whole[:, ::2], weights["columns"])
    assert torch.equal(whole[:, 1], weights["other"])
    assert not whole[:, 3:6:2].any()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a": torch.ones(3)}, "bucket 0 lacks b"),
        ({"a": torch.ones(3), "b": torch.ones(2), "c": torch.ones(1)}, "'c' does not belong to bucket 0"),
        ({"a": torch.ones(2), "b": torch.ones(2)}, r"'a' has shape \(2,\), planned was \(3,\)"),
        ({"a": torch.ones(3, dtype=torch.int64), "b": torch.ones(2)}, "'a' is torch.int64 and cannot travel as float32"),
    ],
)
def test_the_publisher_names_what_does_not_fit(tensors: dict[str, torch.Tensor], message: str) -> None:
    publisher = WeightPublisher([("a", torch.float32, (3,)), ("b", torch.float32, (2,))], settings())
    publisher.plan(1)
    with pytest.raises(ValueError, match=message):
        publisher.send_bucket(0, tensors.items())
    publisher.dispose()


def test_a_tensor_twice_is_refused() -> None:
    publisher = WeightPublisher([("a", torch.float32, (3,)), ("b", torch.float32, (2,))], settings())
    publisher.plan(1)
    with pytest.raises(ValueError, match="came twice"):
        publisher.send_bucket(0, [("a", torch.ones(3)), ("a", torch.ones(3)), ("b", torch.ones(2))])
    publisher.dispose()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"a": torch.zeros(3)}, "b is unknown here"),
        ({"a": torch.zeros(3), "b": torch.zeros(2), "tied": torch.zeros(2)}, "tied is not sent"),
        ({"a": torch.zeros(3, 1), "b": torch.zeros(2)}, r"a is float32 \(3,\) on the wire and torch.float32 \(3, 1\) here"),
        ({"a": torch.zeros(3).half(), "b": torch.zeros(2)}, r"a is float32 \(3,\) on the wire and torch.float16 \(3,\) here"),
    ],
)
def test_the_loader_names_what_does_not_fit_before_anything_moves(parameters: dict[str, torch.Tensor], message: str) -> None:
    publisher = WeightPublisher([("a", torch.float32, (3,)), ("b", torch.float32, (2,))], settings())
    with pytest.raises(ValueError, match=message):
        WeightLoader(parameters).begin(publisher.plan(7), 0)
    publisher.dispose()
    assert not any(parameter.any() for parameter in parameters.values())


def test_an_incomplete_publish_never_finishes() -> None:
    weights = {"a": torch.ones(1 << 18), "b": torch.ones(1 << 18)}
    publisher, loader = WeightPublisher(shapes_of(weights), settings()), WeightLoader({k: torch.zeros_like(v) for k, v in weights.items()})
    loader.begin(publisher.plan(3), 0)
    publisher.send_bucket(0, [("a", weights["a"])])
    loader.receive(0)
    with pytest.raises(ValueError, match="only 1 of 2 buckets of weight version 3"):
        loader.finish()
    with pytest.raises(AssertionError, match="1 of 2 buckets were sent"):
        publisher.checksums()
    publisher.dispose()


def test_the_checksum_is_of_the_live_parameter_and_not_of_what_came() -> None:
    weights = {"a": torch.randn(100)}
    live = torch.zeros(100)
    publisher, loader = WeightPublisher(shapes_of(weights), settings()), WeightLoader({"a": live})
    loader.begin(publisher.plan(1), 0)
    publisher.send_bucket(0, weights.items())
    loader.receive(0)
    live[50] += 1
    assert loader.finish() != publisher.checksums()
    publisher.dispose()
