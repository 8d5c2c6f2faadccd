"""Corrections for a rollout policy that is not quite the one that is trained."""

from __future__ import annotations

import torch
from torch import Tensor

from miles.algorithms.numerics import clamped_ratio


@torch.no_grad()
def truncated_importance_weights(train_logprobs: Tensor, rollout_logprobs: Tensor, cap: float) -> tuple[Tensor, dict[str, Tensor]]:
    """min(exp(train - rollout), cap) per token: truncated importance sampling (Ionides 2008), cut from above only.

    The weight multiplies the token's policy loss and carries no gradient. No token leaves the loss or its
    denominator. Average the two metrics over trained tokens only.

    Args:
        train_logprobs: [tokens], of the trainer's policy that the ratio is based on.
        rollout_logprobs: [tokens], as the engine sampled.
        cap: upper limit of the weight.

    Returns:
        weights [tokens], detached, at least float32; and per token "raw" (before the cut) and "effective" (after).
    """
    raw = clamped_ratio(train_logprobs, rollout_logprobs)  # [tokens]
    weights = raw.clamp(max=cap)
    return weights, {"raw": raw, "effective": weights}
