"""The ways in which weights travel, and which one is taken."""

from __future__ import annotations

from pathlib import Path

import torch

from miles.config.run_config import RunConfig
from miles.protocols import WeightReceiver, WeightSender
from miles.weights import broadcast, disk, shared_memory
from miles.weights.broadcast_group import own_address


def choose(args: RunConfig, *, one_host: bool, device: torch.device) -> tuple[str, str]:
    """The transport of a publish, and why."""
    if args.weight_transport != "auto":
        return args.weight_transport, "set by --weight-transport"
    if not one_host:
        return "broadcast", "trainer and engines are on several hosts"
    if _own_gpus(args, device):
        return "broadcast", "trainer and engines have GPUs of their own"
    return "shared_memory", "trainer and engines share a host"


def _own_gpus(args: RunConfig, device: torch.device) -> bool:
    """Whether no worker shares its GPU with another: NCCL takes no two members on one GPU."""
    shared = args.in_process or args.colocate or min(args.gpus_per_trainer, args.gpus_per_engine) < 1
    return device.type == "cuda" and not shared


def make_sender(transport: str, args: RunConfig, *, one_host: bool, device: torch.device) -> WeightSender:
    if transport == "shared_memory":
        return shared_memory.Sender(args.name)
    if transport == "disk":
        return disk.Sender(args.name, Path(args.weight_sync_dir or f"{args.run_dir}/weights"))
    assert transport == "broadcast", transport
    address = "127.0.0.1" if one_host else own_address()
    return broadcast.Sender(address, "nccl" if _own_gpus(args, device) else "gloo", device, args.publish_timeout)


def make_receiver(transport: str, device: torch.device, timeout: float) -> WeightReceiver:
    if transport == "shared_memory":
        return shared_memory.Receiver()
    if transport == "disk":
        return disk.Receiver()
    assert transport == "broadcast", transport
    return broadcast.Receiver(device, timeout)
