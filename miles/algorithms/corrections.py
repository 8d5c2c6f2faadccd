"""Corrections for a rollout policy that is not quite the one that is trained: weights, masks, and how far the two are apart.

`train_logprobs` are the trainer's, of the policy that the ratio is based on; `rollout_logprobs` the engine's, as it sampled.
A weight multiplies a token's policy loss and carries no gradient. A token that a mask rejects has weight 0: it adds nothing,
and stays in the loss's denominator, so rejecting some tokens never makes the others count more.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from miles.algorithms.numerics import LOG_RATIO_LIMIT, widened
from miles.algorithms.segments import Segments

Level = Literal["token", "sequence", "geometric"]
"""Whose ratio counts: each token's own, the product over its sample, or the geometric mean over its sample."""


@torch.no_grad()
def ratios(train_logprobs: Tensor, rollout_logprobs: Tensor, level: Level, samples: Segments) -> Tensor:
    """exp(train - rollout) at one level, the exponent held within +-20.

    Args:
        train_logprobs, rollout_logprobs: [tokens].
        samples: of the tokens, each with all of its trained tokens.

    Returns:
        [tokens], at least float32; with sequence and geometric the same number on all tokens of a sample.
    """
    difference = widened(train_logprobs) - widened(rollout_logprobs)  # [tokens]
    if level == "token":
        exponent = difference
    elif level == "sequence":
        exponent = samples.spread(samples.sum(difference)).to(difference.dtype)
    elif level == "geometric":
        exponent = samples.spread(samples.mean(difference)).to(difference.dtype)
    else:
        raise ValueError(f"level {level!r} is none of token, sequence, geometric")
    return exponent.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


@torch.no_grad()
def truncated_importance_weights(
    train_logprobs: Tensor, rollout_logprobs: Tensor, cap: float, level: Level, samples: Segments
) -> tuple[Tensor, dict[str, Tensor]]:
    """min(ratio, cap): truncated importance sampling (Ionides 2008), cut from above only.

    At level sequence the whole sample's loss is multiplied once by its weight. No token leaves the loss or its
    denominator.

    Args:
        cap: upper limit of the weight.

    Returns:
        weights [tokens], detached; and per token "raw" (before the cut) and "effective" (after). Average these over
        trained tokens only.
    """
    raw = ratios(train_logprobs, rollout_logprobs, level, samples)  # [tokens]
    weights = raw.clamp(max=cap)
    return weights, {"raw": raw, "effective": weights}


@torch.no_grad()
def inside_band(
    train_logprobs: Tensor, rollout_logprobs: Tensor, level: Level, samples: Segments, *, low: float | None, high: float | None
) -> Tensor:
    """Which tokens have a ratio in [low, high].

    Level token is IcePop's band (arXiv 2510.18855) and masked importance sampling; sequence and geometric keep or reject
    whole samples.

    Returns:
        bool [tokens].
    """
    ratio = ratios(train_logprobs, rollout_logprobs, level, samples)
    kept = torch.ones_like(ratio, dtype=torch.bool)
    if low is not None:
        kept &= ratio >= low
    if high is not None:
        kept &= ratio <= high
    return kept


@torch.no_grad()
def without_outliers(train_logprobs: Tensor, rollout_logprobs: Tensor, limit: float, samples: Segments) -> Tensor:
    """Which tokens belong to a sample none of whose tokens has a ratio above `limit` or below 1 / `limit`. bool [tokens]."""
    calm = inside_band(train_logprobs, rollout_logprobs, "token", samples, low=1 / limit, high=limit)
    return samples.spread(samples.all(calm))


@torch.no_grad()
def staleness_weights(lags: Tensor, decay: float) -> Tensor:
    """decay^lag: a token that was written with weights `lag` publishes old counts so much less.

    Args:
        lags: int64 [tokens], -1 where unknown, which counts as 0.
        decay: above 0, at most 1.

    Returns:
        float32 [tokens].
    """
    return torch.pow(torch.tensor(decay, dtype=torch.float64, device=lags.device), lags.clamp(min=0)).float()


def effective_sample_share(weight_sum: float, square_sum: float, count: float) -> float:
    """(sum w)^2 / (n sum w^2): 1 when all n weights are equal, 1 / n when one of them is everything (Kong 1992). NaN for n = 0."""
    return weight_sum**2 / (count * square_sum) if count and square_sum else float("nan")
