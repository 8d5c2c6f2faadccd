"""The ways in which weights travel, and which one is taken."""

from __future__ import annotations

import torch

from miles.config.run_config import RunConfig
from miles.protocols import WeightReceiver, WeightSender
from miles.weights import shared_memory


def choose(args: RunConfig, *, one_host: bool, device: torch.device) -> tuple[str, str]:
    """The transport of a publish, and why."""
    if args.weight_transport != "auto":
        return args.weight_transport, "set by --weight-transport"
    if not one_host:
        return "broadcast", "trainer and engines are on several hosts"
    if device.type == "cuda" and min(args.gpus_per_trainer, args.gpus_per_engine) >= 1 and not args.colocate:
        return "broadcast", "trainer and engines have GPUs of their own"
    return "shared_memory", "trainer and engines share a host"


def make_sender(transport: str, args: RunConfig, device: torch.device) -> WeightSender:
    if transport == "shared_memory":
        return shared_memory.Sender(args.name)
    raise ValueError(f"--weight-transport: {transport} is not known")


def make_receiver(transport: str, device: torch.device, timeout: float) -> WeightReceiver:
    if transport == "shared_memory":
        return shared_memory.Receiver()
    raise ValueError(f"--weight-transport: {transport} is not known")
