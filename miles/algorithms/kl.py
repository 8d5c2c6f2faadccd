"""Estimators of the KL divergence to a reference policy, from the log-probs of sampled tokens."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from miles.algorithms.numerics import LOG_RATIO_LIMIT, widened

Estimator = Literal["k1", "k2", "k3", "k3_bounded"]

SLOPE_LIMIT = 10.0
"""k3_bounded pulls no harder than this: where exp(d) - 1 reaches it, it goes on straight."""


def kl(logprobs: Tensor, ref_logprobs: Tensor, estimator: Estimator) -> Tensor:
    """KL(policy || reference) per token, estimated from tokens that the policy sampled.

    With d = ref_logprobs - logprobs: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d (J. Schulman, "Approximating KL
    divergence", 2020; k3 is the one in GRPO, arXiv 2402.03300).

    k3 goes on along its tangent where d > 20: exp would leave float32, a clamp would turn the gradient around or take
    it away just where the policy is furthest off. So it is finite in value and gradient, never negative, and its
    gradient always points back to the reference. The difference is taken in float64, as exp(d) - 1 - d cancels for
    small d.

    Args:
        logprobs: [tokens], of the policy; gradients flow through these.
        ref_logprobs: [tokens], of the reference.
        estimator: k1, k2, k3 or k3_bounded.

    Returns:
        [tokens], in the wider type of the two, at least float32.
    """
    dtype = torch.promote_types(widened(logprobs).dtype, widened(ref_logprobs).dtype)
    difference = ref_logprobs.detach().double() - logprobs.double()  # [tokens]
    if estimator == "k1":
        value = -difference
    elif estimator == "k2":
        value = 0.5 * difference.square()
    elif estimator in ("k3", "k3_bounded"):
        limit = LOG_RATIO_LIMIT if estimator == "k3" else math.log1p(SLOPE_LIMIT)
        near = difference.clamp(max=limit)
        tangent = math.expm1(limit) - limit + (difference - limit) * math.expm1(limit)
        value = torch.where(difference > limit, tangent, (torch.expm1(near) - near).clamp(min=0))
    else:
        raise ValueError(f"kl_estimator {estimator!r} is none of k1, k2, k3, k3_bounded")
    return value.to(dtype)
