"""The losses of a policy's tokens: clipped (PPO, dual clip), GSPO, CISPO, SAPO.

Each takes the policy's log-probs, those of the ratio's base and the advantages, and gives a loss for every token; what weight
a token has is `aggregation`'s. Gradients flow through `logprobs` alone, half types are computed in float32, and the exponent
of a ratio is held within +-20, beyond which its gradient is 0: value and gradient are finite whatever the policies do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles.algorithms.numerics import LOG_RATIO_LIMIT, clamped_ratio, widened
from miles.algorithms.segments import Segments

_FAR = 1e6
"""Differences of log-probs that are no longer told from infinite ones."""

Report = dict[str, Tensor]
"""Detached, per token: "ratio", and "clipped" (1.0 where a clip acts) or "gate"."""


def clipped_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, eps_low: float, eps_high: float, *, dual_clip: float | None = None
) -> tuple[Tensor, Report]:
    """-min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) with r = exp(logprobs - old_logprobs) (PPO, arXiv 1707.06347).

    With dual_clip c, where A < 0 the loss is no larger than -c A, so a token that has become c times likelier than it was
    pushes no further (arXiv 1912.09729).

    Args:
        logprobs: [tokens], of the policy that is trained.
        old_logprobs: [tokens], of the ratio's base.
        advantages: [tokens].
        eps_low: clip below 1 - eps_low.
        eps_high: clip above 1 + eps_high.
        dual_clip: above 1 + eps_high, or None.

    Returns:
        loss [tokens], and per token "ratio" and "clipped" (1.0 where a clip holds the gradient at 0).
    """
    return _clipped(clamped_ratio(logprobs, old_logprobs.detach()), advantages, eps_low, eps_high, dual_clip)


def gspo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    samples: Segments,
    *,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Report]:
    """The clipped loss with one ratio for a whole sample: s = exp(mean of logprobs - old_logprobs over its tokens).

    GSPO (arXiv 2507.18071), in the form of its section on token advantages: a token's ratio has the value s and the
    gradient s x that of its own log-prob. Where a sample's tokens share advantage and weight, value and gradient are those
    of the sequence form.

    Args:
        samples: of the tokens, each with all of its trained tokens.

    Returns:
        loss [tokens], and per token "ratio" (s) and "clipped".
    """
    difference = (widened(logprobs) - widened(old_logprobs.detach())).clamp(-_FAR, _FAR)  # [tokens]
    mean = samples.spread(samples.mean(difference.detach())).to(difference.dtype)  # [tokens]
    exponent = mean + difference - difference.detach()
    ratio = exponent.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return _clipped(ratio, advantages, eps_low, eps_high, dual_clip)


def cispo_policy_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, eps_low: float, eps_high: float) -> tuple[Tensor, Report]:
    """-sg(clip(r, 1 - eps_low, 1 + eps_high)) A logprob: the clip limits a token's weight and never takes its gradient away.

    CISPO (MiniMax-M1, arXiv 2506.13585). eps_low of 1 or more is no lower limit, as in the paper.

    Returns:
        loss [tokens], and per token "ratio" and "clipped" (1.0 where the weight is limited).
    """
    ratio = clamped_ratio(logprobs.detach(), old_logprobs.detach())  # [tokens]
    low, high = 1 - eps_low, 1 + eps_high
    clipped = (ratio < low) | (ratio > high)
    loss = -ratio.clamp(low, high) * advantages.detach() * widened(logprobs)
    return loss, {"ratio": ratio, "clipped": clipped.to(ratio.dtype)}


def sapo_policy_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, tau_pos: float, tau_neg: float) -> tuple[Tensor, Report]:
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau that of the advantage's sign (SAPO, arXiv 2511.20347).

    A soft gate in the place of a clip: the gradient is that of r A times 4 p (1 - p), with p the sigmoid: 1 at r = 1, and
    less the further r is away.

    Returns:
        loss [tokens], and per token "ratio" and "gate" (4 p (1 - p)).
    """
    advantages = advantages.detach()
    ratio = clamped_ratio(logprobs, old_logprobs.detach())  # [tokens]
    tau = torch.where(advantages > 0, ratio.new_tensor(tau_pos), ratio.new_tensor(tau_neg))
    share = torch.sigmoid(tau * (ratio - 1))
    gate = (4 * share * (1 - share)).detach()
    return -4 / tau * share * advantages, {"ratio": ratio.detach(), "gate": gate}


def _clipped(ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float, dual_clip: float | None) -> tuple[Tensor, Report]:
    advantages = advantages.detach()
    above = (ratio > 1 + eps_high) & (advantages > 0)
    below = (ratio < 1 - eps_low) & (advantages < 0)
    # torch.where, not minimum: the branch that is not taken must not bring its gradient
    limited = torch.where(above, 1 + eps_high, torch.where(below, 1 - eps_low, ratio))
    clipped = above | below
    if dual_clip is not None:
        far = (ratio > dual_clip) & (advantages < 0)
        limited = torch.where(far, dual_clip, limited)
        clipped = clipped | far
    return -limited * advantages, {"ratio": ratio.detach(), "clipped": clipped.to(ratio.dtype)}
