"""Which way weights take, and over which backend."""

import pytest
import torch

from miles.config.run_config import RunConfig
from miles.weights.sender import WeightPublisher
from miles.weights.transports import choose, make_sender

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("settings", "one_host", "device", "way"),
    [
        ({}, True, CPU, "shared_memory"),
        ({}, False, CPU, "broadcast"),
        ({}, True, CUDA, "broadcast"),
        ({"gpus_per_trainer": 0.5, "gpus_per_engine": 0.4}, True, CUDA, "cuda_ipc"),
        ({"gpus_per_trainer": 0.5, "gpus_per_engine": 0.5}, True, CUDA, "cuda_ipc"),
        ({"gpus_per_trainer": 0.5, "gpus_per_engine": 0.5}, True, CPU, "shared_memory"),
        ({"gpus_per_trainer": 0.5, "gpus_per_engine": 0.5}, False, CUDA, "broadcast"),
        ({"gpus_per_trainer": 0.3, "gpus_per_engine": 0.2, "num_engines": 3}, True, CUDA, "cuda_ipc"),
        ({"gpus_per_trainer": 0.5, "gpus_per_engine": 0.4, "num_engines": 2}, True, CUDA, "shared_memory"),
        ({"gpus_per_trainer": 0.4, "gpus_per_engine": 0.2, "num_trainers": 2}, True, CUDA, "shared_memory"),
        ({"gpus_per_engine": 0.4}, True, CUDA, "shared_memory"),
        ({"in_process": True}, True, CUDA, "cuda_ipc"),
        ({"colocate": True}, True, CUDA, "cuda_ipc"),
        ({"colocate": True, "num_engines": 2}, True, CUDA, "shared_memory"),
        ({"weight_transport": "disk"}, False, CUDA, "disk"),
        ({"weight_transport": "cuda_ipc"}, True, CUDA, "cuda_ipc"),
    ],
)
def test_auto_takes_the_shortest_way_that_can_work(settings: dict, one_host: bool, device: torch.device, way: str) -> None:
    assert choose(RunConfig(**settings), one_host=one_host, device=device)[0] == way


@pytest.mark.parametrize("transport", ["shared_memory", "cuda_ipc"])
def test_what_needs_one_host_is_refused_across_hosts(transport: str) -> None:
    with pytest.raises(ValueError, match=f"--weight-transport {transport}.*several hosts"):
        choose(RunConfig(weight_transport=transport), one_host=False, device=CUDA)


def test_cuda_ipc_of_weights_on_the_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--weight-transport cuda_ipc.*on cpu"):
        make_sender("cuda_ipc", RunConfig(), one_host=True, device=CPU)


def test_the_choice_and_its_reason_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    publisher = WeightPublisher([("w", torch.float32, (4,))], RunConfig(name="logged"))
    with caplog.at_level("INFO"):
        for version in (1, 2):
            publisher.plan(version)
    publisher.dispose()
    assert [record.message for record in caplog.records] == [
        "weights travel by shared_memory: trainer and engines share a host, and compute on its CPUs"
    ]


@pytest.mark.parametrize("settings", [{"in_process": True}, {"colocate": True}, {"gpus_per_trainer": 0.5}])
def test_members_that_share_a_gpu_do_not_meet_in_nccl(settings: dict) -> None:
    sender = make_sender("broadcast", RunConfig(**settings), one_host=True, device=CUDA)
    try:
        assert sender.open((16,), 1, 1)["backend"] == "gloo"
    finally:
        sender.dispose()
