"""AdamW, the learning rate's course, and the limit on the gradient's norm."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from miles.config.run_config import RunConfig
from miles.config.train import TrainSection
from miles.train.mesh import Ranks
from miles.train.sharding import local
from miles.types import Role


def build_adamw(model: nn.Module, args: TrainSection, lr: float) -> torch.optim.AdamW:
    """One group with weight decay, and one without it for vectors (norms, biases)."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": args.weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=lr,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_eps,
        fused=True,
    )


def total_steps(args: RunConfig, role: Role) -> int:
    """Optimizer steps of a role over the whole run."""
    assert args.num_rollout is not None, "num_rollout is filled in before trainers are built"
    rollouts = args.num_rollout - (args.num_critic_only_steps if args.use_critic and role == "actor" else 0)
    return max(1, rollouts) * math.ceil(args.samples_per_rollout / args.samples_per_step)


def learning_rate(step: int, total: int, peak: float, args: TrainSection) -> float:
    """The rate of optimizer step `step`, counted from 0, of `total`.

    Warm-up rises by equal amounts and reaches the peak in its last step. linear and cosine then fall so that the step
    after the last one would have min_lr; steps past `total` stay there.
    """
    if step < args.lr_warmup_steps:
        return peak * (step + 1) / args.lr_warmup_steps
    if args.lr_schedule == "constant":
        return peak
    done = min(1.0, (step - args.lr_warmup_steps) / max(1, total - args.lr_warmup_steps))
    left = 1.0 - done if args.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return args.min_lr + (peak - args.min_lr) * left


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], limit: float, ranks: Ranks) -> float:
    """Scale all gradients down to the global norm `limit` if they are above it. Returns the norm before."""
    grads = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    grads = [grad for grad in grads if grad.numel()]
    squares: Tensor = torch.zeros((), dtype=torch.float64, device=ranks.device)
    if grads:
        squares = torch.stack(torch._foreach_norm(grads)).double().square().sum()
    norm = ranks.sum(squares).sqrt().item()
    if math.isfinite(norm) and norm > limit:
        torch._foreach_mul_(grads, limit / norm)
    return norm
