"""Moves a trainer's weights and optimizer state to host memory and back. Twice in one direction is the same as once."""

from __future__ import annotations

import gc

import torch
from torch import nn


def move(model: nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device) -> None:
    """Move everything to `device`; gradients are given up. Where it already lies there, nothing is copied."""
    if optimizer is not None:
        optimizer.zero_grad(set_to_none=True)
    model.to(device)
    if optimizer is not None:
        for state in optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.ndim > 0:
                    state[name] = value.to(device)
    if torch.cuda.is_available() and device.type == "cpu":
        gc.collect()
        torch.cuda.empty_cache()
