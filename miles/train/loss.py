"""The loss of a micro-batch and the sums from which a step's metrics are made."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from miles.algorithms.corrections import inside_band, ratios, staleness_weights, truncated_importance_weights, without_outliers
from miles.algorithms.kl import kl
from miles.algorithms.policy_loss import Report, cispo_policy_loss, clipped_policy_loss, gspo_policy_loss, sapo_policy_loss
from miles.algorithms.score_centering import expected_score
from miles.algorithms.segments import Segments
from miles.algorithms.value_loss import clipped_value_loss
from miles.config.algorithm import AlgorithmSection
from miles.train.targets import TokenColumns

Sums = dict[str, Tensor]
"""Sums over tokens; over samples where the name begins with `seq_`; by weight lag, [LAGS], where it ends in `/lag`. A name that
ends in `_max` is a maximum, `loss` and names that end in `_loss` are weighted already."""

LAGS = 9
"""Tokens are told apart by weight lag 0 .. 7, and 8 or more."""


def actor_loss(
    logprobs: Tensor,
    entropy: Tensor,
    columns: TokenColumns,
    tokens: Tensor,
    args: AlgorithmSection,
    *,
    likeliest: Tensor | None = None,
) -> tuple[Tensor, Sums]:
    """Sum over the trained tokens of weight x (policy loss + kl_loss_coef x KL - entropy_coef x entropy).

    Args:
        logprobs, entropy: [trained tokens] with gradients, at `tokens`, places in the columns: whole samples.
        likeliest: [trained tokens, likeliest] with gradients, of the sampler's likeliest tokens; with score_centering.
    """
    weights = columns.weights[tokens]
    sums: Sums = {"tokens": weights.new_tensor(len(tokens)), "entropy": entropy.detach().sum()}
    if args.advantage_estimator == "sft":
        policy = -logprobs * columns.advantages[tokens]
    else:
        policy = _corrected_policy_loss(logprobs, columns, tokens, args, sums, likeliest=likeliest)
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


def _corrected_policy_loss(
    logprobs: Tensor, columns: TokenColumns, tokens: Tensor, args: AlgorithmSection, sums: Sums, *, likeliest: Tensor | None
) -> Tensor:
    """[trained tokens], with corrections; writes what there is to know of ratios and weights into `sums`."""
    detached, rollout, lags = logprobs.detach(), columns.rollout_logprobs[tokens], columns.lags[tokens]
    samples = Segments.of(columns.sample_of[tokens])
    old = detached if columns.old_logprobs is None else columns.old_logprobs[tokens]
    told = _Told(sums, samples, lags)
    policy, report = _policy_loss(logprobs, old, columns.advantages[tokens], samples, args)
    told.mean("ratio_mean", report["ratio"])
    told.highest("ratio_deviation_max", (report["ratio"] - 1).abs())
    if "clipped" in report:
        told.by_lag("clip_fraction", report["clipped"])
        told.share_of_samples("seq_clip_fraction", samples.any(report["clipped"] > 0))
    else:
        told.by_lag("gate", report["gate"])
    if args.use_tis:
        correction, measured = truncated_importance_weights(old, rollout, args.tis_clip, args.tis_level, samples)
        policy = policy * correction
        told.by_lag("tis_weight_raw", measured["raw"])
        told.by_lag("tis_weight", measured["effective"])
        told.by_lag("tis_clip_fraction", measured["raw"] > args.tis_clip)
        for name, values in (("seq_tis_weight_raw", measured["raw"]), ("seq_tis_weight", correction)):
            sums[name] = samples.mean(values).sum()
    # Where the engines' log-probs are the ratio's base, it is the trained policy itself that may be too far from them.
    kept = _kept(detached if args.use_rollout_logprobs else old, rollout, samples, args)
    if kept is not None:
        policy = torch.where(kept, policy, 0.0)
        told.by_lag("rejected", ~kept)
        told.share_of_samples("seq_rejected", ~samples.any(kept))
    if likeliest is not None:
        assert columns.likeliest_logprobs is not None
        sampler = columns.likeliest_logprobs[tokens]
        policy = policy + columns.advantages[tokens] * expected_score(likeliest, sampler, partial(_weight_of_ratio, args))
        told.mean("sampler_head_mass", sampler.double().exp().sum(-1))
    if args.staleness_decay < 1:
        fresh = staleness_weights(lags, args.staleness_decay)
        policy = policy * fresh
        told.mean("staleness_weight", fresh)
    told.distance(detached, rollout)
    return policy


def _weight_of_ratio(args: AlgorithmSection, ratio: Tensor) -> Tensor:
    """What token-level corrections make of a token with this ratio."""
    weights = ratio.clamp(max=args.tis_clip) if args.use_tis else torch.ones_like(ratio)
    if args.mask_level is None:
        return weights
    low, high = args.mask_low, args.mask_high
    return weights * ((ratio >= (low or 0.0)) & (ratio <= (math.inf if high is None else high)))


def _policy_loss(logprobs: Tensor, old: Tensor, advantages: Tensor, samples: Segments, args: AlgorithmSection) -> tuple[Tensor, Report]:
    low, high = args.eps_clip, args.eps_clip if args.eps_clip_high is None else args.eps_clip_high
    if args.policy_loss == "gspo":
        return gspo_policy_loss(logprobs, old, advantages, samples, eps_low=low, eps_high=high, dual_clip=args.dual_clip)
    if args.policy_loss == "cispo":
        return cispo_policy_loss(logprobs, old, advantages, low, high)
    if args.policy_loss == "sapo":
        return sapo_policy_loss(logprobs, old, advantages, args.sapo_tau_pos, args.sapo_tau_neg)
    return clipped_policy_loss(logprobs, old, advantages, low, high, dual_clip=args.dual_clip)


def _kept(train: Tensor, rollout: Tensor, samples: Segments, args: AlgorithmSection) -> Tensor | None:
    """bool [tokens] what the masks leave; None without masks."""
    kept = None
    if args.mask_level is not None:
        kept = inside_band(train, rollout, args.mask_level, samples, low=args.mask_low, high=args.mask_high)
    if args.mask_outlier is not None:
        calm = without_outliers(train, rollout, args.mask_outlier, samples)
        kept = calm if kept is None else kept & calm
    return kept


class _Told:
    """Adds up what one micro-batch has to tell, per token, per sample and by weight lag."""

    def __init__(self, sums: Sums, samples: Segments, lags: Tensor) -> None:
        self.sums, self.samples = sums, samples
        self._known = lags >= 0
        self._bucket = lags.clamp(0, LAGS - 1)
        sums["_sequences"] = lags.new_tensor(len(samples)).double()
        self._sum_by_lag("tokens/lag", torch.ones_like(lags))

    def _sum_by_lag(self, name: str, values: Tensor) -> None:
        masks = self._bucket[None] == torch.arange(LAGS, device=values.device)[:, None]  # [LAGS, tokens]
        self.sums[name] = ((masks & self._known) * values.double()).sum(-1)

    def mean(self, name: str, values: Tensor) -> None:
        self.sums[name] = values.double().sum()

    def by_lag(self, name: str, values: Tensor) -> None:
        self.mean(name, values)
        self._sum_by_lag(f"{name}/lag", values)

    def highest(self, name: str, values: Tensor) -> None:
        self.sums[name] = values.max() if len(values) else values.sum()

    def share_of_samples(self, name: str, which: Tensor) -> None:
        self.sums[name] = which.double().sum()

    def distance(self, train: Tensor, rollout: Tensor) -> None:
        """How far the trained policy is from the one that wrote: log-probs, KL, and what it leaves of the samples' number."""
        difference = (train - rollout).abs()
        self.mean("train_rollout_logprob_abs_diff", difference)
        self.highest("train_rollout_logprob_abs_diff_max", difference)
        self.by_lag("rollout_kl", kl(rollout, train, "k3"))
        self.sums["seq_rollout_kl"] = (rollout - train).double().sum()
        by_token = ratios(train, rollout, "token", self.samples).double()
        by_sample = (self.samples.sum(train.double() - rollout.double())).clamp(-20, 20).exp()
        self.sums |= {"_ratio": by_token.sum(), "_ratio_squared": by_token.square().sum()}
        self.sums |= {"_seq_ratio": by_sample.sum(), "_seq_ratio_squared": by_sample.square().sum()}


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
