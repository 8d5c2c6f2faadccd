"""FSDP2 over a trained model: layer by layer, then the root, whose forward is the one that is called."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from miles.train.model import TrainedModel


def needs_sharding(world_size: int, dtype: torch.dtype) -> bool:
    """One rank in float32 computes with its master weights themselves; FSDP does the casting otherwise."""
    return world_size > 1 or dtype != torch.float32


def shard(model: TrainedModel, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Wrap `model` in place. Weights stay float32, the passes run in `dtype`, gradients are summed in float32.

    Layers move to the mesh's device one after the other, so that the device never holds the whole model.
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    add_gradients(model)


def add_gradients(model: nn.Module) -> None:
    """Losses are weighted with global counts, so gradients of ranks are added, never averaged."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sums


def local(tensor: Tensor) -> Tensor:
    """This rank's part, sharing memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank: a collective for shards."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_like(example: Tensor, part: Tensor) -> Tensor:
    """The tensor of which this rank has `part`, as it has `local(example)` of the example."""
    if not isinstance(example, DTensor):
        return part
    return DTensor.from_local(part, example.device_mesh, example.placements, run_check=False, shape=example.shape, stride=example.stride())
