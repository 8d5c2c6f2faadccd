"""Score centering: takes out of each token's gradient what its sampler would expect of it (arXiv 2609.20807)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from miles.algorithms.numerics import widened

SMALLEST_TAIL = 1e-6
"""Below this the policy's mass outside the head is rounding; what it would add to the sum is no larger."""

Weight = Callable[[Tensor], Tensor]
"""What a correction makes of a token, as a function of p / q at that token alone: 1, min(p / q, cap), a band."""


def expected_score(logprobs: Tensor, sampler_logprobs: Tensor, weight: Weight = torch.ones_like) -> Tensor:
    """sum over tokens v of sg(q_v w_v) log p_v, with w_v = weight(p_v / q_v): its gradient is the weighted score that the sampler expects.

    q is known at its likeliest tokens, the head; outside of it it is taken for rho p, rho = (1 - sum q) / (1 - sum p) over the
    head. Since the p-weighted scores of all tokens add up to 0, the tail is taken off at the head:

        sum over the head of sg(q_v w_v - rho weight(1 / rho) p_v) log p_v

    exact when the head is the whole vocabulary. A token's policy loss -A w log p plus A times this has the gradient
    -A (w s - E_q[w s]), whose expectation under the sampler is 0 for every A that does not depend on the token.

    Args:
        logprobs: [tokens, head] of the policy that is trained, at the sampler's likeliest tokens.
        sampler_logprobs: [tokens, head] of the sampler, at the same.

    Returns:
        [tokens], at least float32, with gradients to `logprobs` only through log p_v.
    """
    logprobs = widened(logprobs)
    return (coefficients(logprobs, sampler_logprobs, weight) * logprobs).sum(-1)


@torch.no_grad()
def coefficients(logprobs: Tensor, sampler_logprobs: Tensor, weight: Weight = torch.ones_like) -> Tensor:
    """[tokens, head] q_v w_v - rho weight(1 / rho) p_v; all 0 on-policy without a correction."""
    p = widened(logprobs).exp()
    q = widened(sampler_logprobs).to(p.dtype).exp()
    rho = (1 - q.sum(-1, keepdim=True)).clamp_min(0) / (1 - p.sum(-1, keepdim=True)).clamp_min(SMALLEST_TAIL)
    tail = torch.where(rho > 0, rho * weight(1 / rho.clamp_min(torch.finfo(rho.dtype).tiny)), 0.0)
    ratio = torch.where(q > 0, p / q.clamp_min(torch.finfo(q.dtype).tiny), 1.0)
    return q * weight(ratio) - tail * p
