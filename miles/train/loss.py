"""The loss of a micro-batch and the sums from which a step's metrics are made."""

from __future__ import annotations

import torch
from torch import Tensor

from miles.algorithms.corrections import truncated_importance_weights
from miles.algorithms.kl import kl
from miles.algorithms.policy_loss import clipped_policy_loss
from miles.algorithms.value_loss import clipped_value_loss
from miles.config.algorithm import AlgorithmSection
from miles.train.targets import TokenColumns

Sums = dict[str, Tensor]
"""Sums over tokens. A name that ends in `_max` is a maximum, `loss` and names that end in `_loss` are weighted already."""


def actor_loss(logprobs: Tensor, entropy: Tensor, columns: TokenColumns, tokens: Tensor, args: AlgorithmSection) -> tuple[Tensor, Sums]:
    """Sum over the trained tokens of weight x (policy loss + kl_loss_coef x KL - entropy_coef x entropy).

    Args:
        logprobs, entropy: [trained tokens] with gradients, at `tokens`, places in the columns.
    """
    weights = columns.weights[tokens]
    advantages = columns.advantages[tokens]
    rollout = columns.rollout_logprobs[tokens]
    detached = logprobs.detach()
    sums: Sums = {"tokens": weights.new_tensor(len(tokens)), "entropy": entropy.detach().sum()}
    if args.advantage_estimator == "sft":
        policy = -logprobs * advantages
    else:
        old = detached if columns.old_logprobs is None else columns.old_logprobs[tokens]
        eps_high = args.eps_clip if args.eps_clip_high is None else args.eps_clip_high
        policy, ratios = clipped_policy_loss(logprobs, old, advantages, args.eps_clip, eps_high)
        sums |= {"ratio_mean": ratios["ratio"].sum(), "clip_fraction": ratios["clipped"].sum()}
        if args.use_tis:
            correction, measured = truncated_importance_weights(old, rollout, args.tis_clip)
            policy = policy * correction
            sums |= {"tis_weight_raw": measured["raw"].sum(), "tis_weight": measured["effective"].sum()}
        difference = (detached - rollout).abs()
        sums["train_rollout_logprob_abs_diff"] = difference.sum()
        sums["train_rollout_logprob_abs_diff_max"] = difference.max() if len(tokens) else difference.sum()
        sums["rollout_kl"] = kl(rollout, detached, "k3").sum()
    loss = (weights * policy).sum()
    sums["policy_loss"] = loss.detach()
    if columns.ref_logprobs is not None:
        divergence = kl(logprobs, columns.ref_logprobs[tokens], args.kl_estimator)
        sums["kl"] = divergence.detach().sum()
        if args.kl_loss_coef:
            loss = loss + args.kl_loss_coef * (weights * divergence).sum()
    if args.entropy_coef:
        loss = loss - args.entropy_coef * (weights * entropy).sum()
    sums["loss"] = loss.detach()
    return loss, sums


def critic_loss(values: Tensor, columns: TokenColumns, tokens: Tensor, args: AlgorithmSection) -> tuple[Tensor, Sums]:
    """Sum over the trained tokens of weight x clipped value loss. values: [trained tokens] with gradients."""
    assert columns.old_values is not None
    assert columns.returns is not None
    old, returns = columns.old_values[tokens], columns.returns[tokens]
    loss = (columns.weights[tokens] * clipped_value_loss(values, old, returns, args.value_clip)).sum()
    errors = returns - old
    return loss, {
        "tokens": old.new_tensor(len(tokens)),
        "loss": loss.detach(),
        "value_loss": loss.detach(),
        "value_mean": old.sum(),
        "return_mean": returns.sum(),
        "_returns_squared": returns.square().sum(),
        "_errors": errors.sum(),
        "_errors_squared": errors.square().sum(),
    }


def add_sums(total: Sums, part: Sums) -> Sums:
    part = {name: value.double() for name, value in part.items()}
    return {
        name: (torch.maximum if name.endswith("_max") else torch.add)(total[name], value) if total else value
        for name, value in part.items()
    }
