"""Entropy of the next-token distribution."""

from __future__ import annotations

import torch
from torch import Tensor

from miles.algorithms.numerics import widened


def entropy(logits: Tensor) -> Tensor:
    """-sum p log p of softmax(logits), in nats, differentiable.

    Args:
        logits: [..., vocabulary], already divided by the temperature; -inf is a token that cannot be.

    Returns:
        [...], at least float32.
    """
    logprobs = torch.log_softmax(widened(logits), dim=-1)
    # p log p is 0 at p = 0, where the product would be 0 * -inf in value and in gradient
    possible = logprobs.masked_fill(logprobs == -torch.inf, 0.0)
    return -(logprobs.exp() * possible).sum(dim=-1)
