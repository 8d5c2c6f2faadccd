"""The ways in which weights travel, and which one is taken."""

from __future__ import annotations

from pathlib import Path

import torch

from miles.config.run_config import RunConfig
from miles.protocols import WeightReceiver, WeightSender
from miles.weights import broadcast, cuda_ipc, disk, shared_memory
from miles.weights.broadcast_group import own_address

_ROUNDING = 1e-6


def choose(args: RunConfig, *, one_host: bool, device: torch.device) -> tuple[str, str]:
    """The transport of a publish, and why.

    Args:
        one_host: whether trainer and engines share a host.
        device: where the trainer's weights are.

    Raises:
        ValueError: the one that was asked for cannot work here.
    """
    if args.weight_transport != "auto":
        if args.weight_transport in ("shared_memory", "cuda_ipc") and not one_host:
            raise ValueError(
                f"--weight-transport {args.weight_transport}: trainer and engines are on several hosts; take broadcast or disk"
            )
        return args.weight_transport, "set by --weight-transport"
    if not one_host:
        return "broadcast", "trainer and engines are on several hosts"
    if device.type != "cuda":
        return "shared_memory", "trainer and engines share a host, and compute on its CPUs"
    if _own_gpus(args, device):
        return "broadcast", "trainer and engines have GPUs of their own"
    if _one_gpu(args):
        return "cuda_ipc", "trainer and engines share one GPU"
    return "shared_memory", "trainer and engines share a host and several of its GPUs, and may not see each other's"


def _own_gpus(args: RunConfig, device: torch.device) -> bool:
    """Whether no worker shares its GPU with another: NCCL takes no two members on one GPU."""
    shared = args.in_process or args.colocate or min(args.gpus_per_trainer, args.gpus_per_engine) < 1
    return device.type == "cuda" and not shared


def _one_gpu(args: RunConfig) -> bool:
    """Whether all trainers and engines of the run are on the same GPU."""
    if args.in_process:
        return True
    most = 0.5 if args.colocate else 1.0  # who takes turns asks for half a GPU
    trainers = args.num_trainers * (2 if args.use_critic else 1)
    together = trainers * min(args.gpus_per_trainer, most) + args.num_engines * min(args.gpus_per_engine, most)
    return args.num_trainers == 1 and together < 1 + _ROUNDING


def make_sender(transport: str, args: RunConfig, *, one_host: bool, device: torch.device) -> WeightSender:
    if transport == "shared_memory":
        return shared_memory.Sender()
    if transport == "cuda_ipc":
        return cuda_ipc.Sender(device)
    if transport == "disk":
        return disk.Sender(args.name, Path(args.weight_sync_dir or f"{args.run_dir}/weights"))
    assert transport == "broadcast", transport
    address = "127.0.0.1" if one_host else own_address()
    return broadcast.Sender(address, "nccl" if _own_gpus(args, device) else "gloo", device, args.publish_timeout)


def make_receiver(transport: str, device: torch.device, timeout: float) -> WeightReceiver:
    if transport == "shared_memory":
        return shared_memory.Receiver()
    if transport == "cuda_ipc":
        return cuda_ipc.Receiver()
    if transport == "disk":
        return disk.Receiver()
    assert transport == "broadcast", transport
    return broadcast.Receiver(device, timeout)
