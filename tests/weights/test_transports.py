"""Which way weights take, and over which backend."""

import pytest
import torch

from miles.config.run_config import RunConfig
from miles.weights.transports import choose, make_sender

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("settings", "one_host", "device", "way"),
    [
        ({}, True, CPU, "shared_memory"),
        ({}, False, CPU, "broadcast"),
        ({}, True, CUDA, "broadcast"),
        ({"gpus_per_trainer": 0.5}, True, CUDA, "shared_memory"),
        ({"gpus_per_engine": 0.4}, True, CUDA, "shared_memory"),
        ({"in_process": True}, True, CUDA, "shared_memory"),
        ({"colocate": True}, True, CUDA, "shared_memory"),
        ({"weight_transport": "disk"}, False, CUDA, "disk"),
    ],
)
def test_auto_takes_the_shortest_way_that_can_work(settings: dict, one_host: bool, device: torch.device, way: str) -> None:
    assert choose(RunConfig(**settings), one_host=one_host, device=device)[0] == way


@pytest.mark.parametrize("settings", [{"in_process": True}, {"colocate": True}, {"gpus_per_trainer": 0.5}])
def test_members_that_share_a_gpu_do_not_meet_in_nccl(settings: dict) -> None:
    sender = make_sender("broadcast", RunConfig(**settings), one_host=True, device=CUDA)
    try:
        assert sender.open((16,), 1, 1)["backend"] == "gloo"
    finally:
        sender.dispose()
