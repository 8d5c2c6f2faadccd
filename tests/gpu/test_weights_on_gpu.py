"""Weights that leave from and arrive on GPUs. Run by hand: pytest -m gpu tests/gpu/test_weights_on_gpu.py"""

import gc
import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from miles.config.run_config import RunConfig
from miles.weights.broadcast_group import Group
from miles.weights.checksum import FUSED, checksum, checksums
from miles.weights.receiver import WeightLoader
from miles.weights.sender import WeightPublisher
from tests.weights.engine_process import engines, publish

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("size", [0, 1, 7, 8, 100_003, 80_000_001])
def test_checksums_are_the_same_on_cpu_and_gpu(size: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    for kind in ("mix64", "xxh3_64"):
        assert checksum(data.cuda(), kind) == checksum(data, kind)


def test_many_tensors_at_once_have_the_checksums_of_each() -> None:
    tensors = {f"t{size}": torch.randn(size, device="cuda") for size in (0, 1, 2, 3, 8191, 8192, 8193, 1_000_003)}
    tensors |= {"half": torch.randn(301, 333, device="cuda").bfloat16(), "turned": torch.randn(40, 50, device="cuda").T}
    tensors["misaligned"] = torch.randn(1001, device="cuda").bfloat16()[1:]
    assert FUSED
    assert checksums(tensors, "mix64") == {name: checksum(tensor.cpu(), "mix64") for name, tensor in tensors.items()}


def test_mix64_is_fast() -> None:
    data = torch.randn(1 << 29, device="cuda")
    seconds = []
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        checksums({"data": data}, "mix64")
        seconds.append(time.perf_counter() - started)
    speed = data.nbytes / min(seconds) / 1e9
    print(f"mix64: {speed:.0f} GB/s")
    assert speed > 1000


@pytest.mark.parametrize("transport", ["shared_memory", "disk", "broadcast", "cuda_ipc"])
@pytest.mark.parametrize("devices", [("cuda:0", "cuda:0"), ("cuda:0", "cpu")])
def test_gpu_weights_arrive_on_any_device(transport: str, devices: tuple[str, str], tmp_path: Path) -> None:
    """Trainer and engines share one GPU, so broadcast goes over gloo."""
    publish_over(transport, devices, 0.5, tmp_path)


def free_memory() -> int:
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def test_cuda_ipc_between_processes_and_nothing_is_left() -> None:
    """float32 weights leave as bfloat16; an engine that was killed is done without; buffers of 64 MiB come back to the GPU."""
    weights = {f"w{index}": torch.randn(1 << 12, 1 << 12, device="cuda") for index in range(6)}
    shapes = [(name, torch.bfloat16, tuple(weight.shape)) for name, weight in weights.items()]
    args = RunConfig(weight_bucket_mb=64, gpus_per_trainer=0.5, gpus_per_engine=0.4)
    publisher = WeightPublisher(shapes, args, "cuda")
    with engines(2) as (first, second):
        for engine in (first, second):
            engine.call("make", shapes, 20.0, "cuda")
        before = free_memory()
        for version in (1, 2, 3):
            for weight in weights.values():
                weight.mul_(1 + version)
            sent, *received = publish(publisher, weights, [first, second], version)
            assert received == [sent, sent]
            assert sent == {name: checksum(weight.bfloat16(), "mix64") for name, weight in weights.items()}
        assert publisher.plan(4, num_receivers=2).transport == "cuda_ipc"
        second.kill()
        publisher.close()
        sent, received = publish(publisher, weights, [first], 4)
        assert received == sent
        values = first.call("values")
        assert all(torch.equal(values[name], weight.bfloat16().cpu()) for name, weight in weights.items())
        assert free_memory() > before - (2 * 64 << 20) - (64 << 20), "two buffers, and what the killed engine gave back"
        publisher.dispose()
        first.call("dispose")
        left = before - free_memory()
        assert left < 32 << 20, f"{left >> 20} MiB are left"


@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="NCCL wants one GPU for each member")
def test_broadcast_over_nccl(tmp_path: Path) -> None:
    publish_over("broadcast", ("cuda:1", "cuda:2"), 1.0, tmp_path)


def test_the_nccl_group_stands_apart_from_the_default_one() -> None:
    process = multiprocessing.get_context("spawn").Process(target=nccl_group_alone)
    process.start()
    process.join(120)
    assert process.exitcode == 0


def nccl_group_alone() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = Group(30.0)
    group.join(store, 1, 0, 1, backend="nccl", address="127.0.0.1")
    group.broadcast(torch.zeros(1 << 20, dtype=torch.uint8, device="cuda"))
    assert not dist.is_initialized()
    group.leave()


def publish_over(transport: str, devices: tuple[str, str], gpu_share: float, folder: Path) -> None:
    args = RunConfig(
        weight_bucket_mb=16,
        weight_transport=transport,
        weight_sync_dir=str(folder),
        publish_timeout=60.0,
        gpus_per_trainer=gpu_share,
        gpus_per_engine=gpu_share,
    )
    weights = {f"w{index}": torch.randn(1000 + index, 1000, device="cuda:0") for index in range(20)}
    publisher = WeightPublisher([(name, torch.bfloat16, tensor.shape) for name, tensor in weights.items()], args, "cuda:0")
    parameters = [{name: torch.zeros(w.shape, dtype=torch.bfloat16, device=device) for name, w in weights.items()} for device in devices]
    loaders = [WeightLoader(own, 60.0) for own in parameters]
    with ThreadPoolExecutor(3) as pool:
        for version in (1, 2):
            plan = publisher.plan(version, num_receivers=2)
            assert plan.checksum == "mix64"
            for rank, loader in enumerate(loaders):
                loader.begin(plan, rank)
            for index, bucket in enumerate(plan.buckets):
                sending = pool.submit(publisher.send_bucket, index, [(spec.name, weights[spec.name]) for spec in bucket])
                if not plan.concurrent:
                    sending.result()
                for receiving in [pool.submit(loader.receive, index) for loader in loaders]:
                    receiving.result()
                sending.result()
            assert [loader.finish() for loader in loaders] == [publisher.checksums()] * 2
            publisher.close()
    for own in parameters:
        assert all(torch.equal(own[name].cpu(), weight.bfloat16().cpu()) for name, weight in weights.items())
    publisher.dispose()
    for loader in loaders:
        loader.dispose()
