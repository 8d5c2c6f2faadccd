"""PPO's clipped surrogate."""

from __future__ import annotations

import torch
from torch import Tensor

from miles.algorithms.numerics import clamped_ratio


def clipped_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, eps_low: float, eps_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) with r = exp(logprobs - old_logprobs) (PPO, arXiv 1707.06347).

    The exponent is held within +-20, so value and gradient stay finite whatever the policies do; beyond, the gradient
    is 0. Gradients flow through logprobs alone. bfloat16 is computed in float32.

    Args:
        logprobs: [tokens], of the policy that is trained.
        old_logprobs: [tokens], of the ratio's base.
        advantages: [tokens].
        eps_low: clip below 1 - eps_low.
        eps_high: clip above 1 + eps_high.

    Returns:
        loss [tokens], and detached per token: "ratio", and "clipped" (1.0 where the clip holds the gradient at 0).
    """
    advantages = advantages.detach()
    ratio = clamped_ratio(logprobs, old_logprobs.detach())  # [tokens]
    above = (ratio > 1 + eps_high) & (advantages > 0)
    below = (ratio < 1 - eps_low) & (advantages < 0)
    # torch.where, not minimum: the branch that is not taken must not bring its gradient
    limited = torch.where(above, 1 + eps_high, torch.where(below, 1 - eps_low, ratio))
    loss = -limited * advantages
    return loss, {"ratio": ratio.detach(), "clipped": (above | below).to(ratio.dtype)}
