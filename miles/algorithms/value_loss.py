"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from miles.algorithms.numerics import widened


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """max((v - R)^2, (clip(v, old - clip, old + clip) - R)^2) / 2 per token, as PPO's reference code has it.

    Args:
        values: [tokens], of the critic that is trained; gradients flow through these.
        old_values: [tokens], from before the rollout's updates.
        returns: [tokens].
        clip: how far a value may move from the old one before the gradient that moves it further is 0.

    Returns:
        loss [tokens], at least float32.
    """
    values, old_values, returns = widened(values), widened(old_values.detach()), widened(returns.detach())
    limited = torch.maximum(torch.minimum(values, old_values + clip), old_values - clip)
    plain, held = (values - returns).square(), (limited - returns).square()
    return 0.5 * torch.where(held > plain, held, plain)
