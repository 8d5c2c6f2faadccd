"""What each token of a share is trained towards: advantages, returns, and its weight in the loss."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from miles.algorithms.advantages import (
    GroupForm,
    discounted_returns,
    distillation_advantages,
    gae,
    group_advantages,
    moments,
    normalize,
    outcome_rewards,
)
from miles.algorithms.aggregation import step_totals, token_weights
from miles.algorithms.kl import kl
from miles.config.run_config import RunConfig
from miles.train.mesh import Ranks
from miles.types import Likeliest, TrainShare

WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")


@dataclass(slots=True)
class TokenColumns:
    """float32 [own tokens] each, aligned with share.data.token_ids; 0 where `trained` is not set."""

    trained: np.ndarray  # bool [own tokens] the loss mask, without unscored samples and first tokens
    weights: Tensor  # in the loss of the token's optimizer step
    advantages: Tensor
    rollout_logprobs: Tensor
    versions: np.ndarray  # int32 [own tokens]
    sample_of: Tensor  # int64 [own tokens] place of its sample in the share
    lags: Tensor  # int64 [own tokens] publishes between its weights and the newest, -1: unknown
    old_logprobs: Tensor | None = None  # the ratio's base; None: the new ones before their step, so the ratio is 1
    ref_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None
    likeliest_ids: Tensor | None = None  # int32 [own tokens, likeliest], with score_centering
    likeliest_logprobs: Tensor | None = None  # of the sampler at these


def token_columns(share: TrainShare, args: RunConfig, device: torch.device, version: int = -1) -> TokenColumns:
    """The columns that need no model; advantages are those of `fill_advantages`, and of sft.

    Args:
        version: the newest published weights, -1: none.
    """
    data = share.data
    lengths = np.diff(data.offsets)
    sample_of = np.repeat(np.arange(data.num_samples), lengths)
    trained = (data.loss_mask != 0) & ~np.isnan(data.rewards)[sample_of]
    trained[data.offsets[:-1][lengths > 0]] = False
    lags = np.where((data.weight_versions >= 0) & (version >= 0), version - data.weight_versions.astype(np.int64), -1)
    columns = TokenColumns(
        trained=trained,
        weights=torch.zeros(0),
        advantages=torch.tensor(trained, dtype=torch.float32, device=device),
        rollout_logprobs=torch.tensor(data.rollout_logprobs, device=device),
        versions=data.weight_versions,
        sample_of=torch.from_numpy(sample_of).to(device),
        lags=torch.from_numpy(lags).to(device),
    )
    columns.weights = _on_tokens(_sample_weights(share, args), columns)
    if args.teacher_urls:
        if data.teacher_logprobs is None:
            raise ValueError("--teacher-urls: no teacher has scored these samples; does --rollout-function run its groups by run_group?")
        columns.teacher_logprobs = torch.tensor(data.teacher_logprobs, device=device)
    if args.score_centering:
        told = data.likeliest
        if told is None and not trained.any():
            told = Likeliest(*(np.zeros((len(trained), args.score_centering), kind) for kind in (np.int32, np.float32)))
        if told is None:
            raise ValueError(
                "--score-centering: the samples do not tell the sampler's likeliest tokens; does --generate-function keep them?"
            )
        columns.likeliest_ids = torch.tensor(told.ids, device=device)
        columns.likeliest_logprobs = torch.tensor(told.logprobs, device=device)
    return columns


def _on_tokens(by_sample: Tensor, columns: TokenColumns) -> Tensor:
    """[own samples] -> float32 [own tokens], 0 where nothing is trained."""
    device = columns.sample_of.device
    trained = torch.from_numpy(columns.trained).to(device)
    return by_sample.float().to(device)[columns.sample_of] * trained


def _sample_weights(share: TrainShare, args: RunConfig) -> Tensor:
    weights = torch.zeros(len(share.positions), dtype=torch.float64)
    step_of = share.batch.step_of[share.positions]
    counts = torch.tensor(share.batch.num_trained_tokens)
    for step in range(share.num_steps):
        tokens, samples = step_totals(counts[torch.from_numpy(share.batch.step_of == step)])
        own = torch.from_numpy(np.flatnonzero(step_of == step))
        own_counts = counts[torch.tensor(share.positions)[own]]
        weights[own] = token_weights(args.loss_aggregation, own_counts, tokens, samples, args.max_response_length)
    return weights


def fill_advantages(columns: TokenColumns, share: TrainShare, args: RunConfig, ranks: Ranks, values: Tensor | None = None) -> None:
    """Advantages of every trained token. All ranks call it; groups and moments are those of the whole batch, however it is split.

    Log-probs of the reference (kl_coef) and of the teacher must be in the columns.

    Args:
        values: ppo: the critic's, float32 [own tokens]. They become old_values, and returns are filled in.
    """
    estimator = args.advantage_estimator
    if estimator == "sft":
        return
    penalty = _kl_penalty(columns, args)
    if estimator == "ppo":
        if values is None:
            raise ValueError("the actor of ppo needs the critic's values")
        _fill_gae(columns, share, args, penalty, values)
    elif estimator == "opd":
        columns.advantages = torch.zeros_like(columns.advantages)
    elif estimator in WHITENED:
        _fill_returns(columns, share, args, penalty)
    else:
        columns.advantages = _on_tokens(_compared_with_siblings(columns, share, args, ranks, penalty), columns)
    if estimator in WHITENED or (estimator == "ppo" and args.normalize_advantages):
        normalize_advantages(columns, share, ranks)
    if columns.teacher_logprobs is not None:
        trained = torch.from_numpy(columns.trained).to(columns.advantages.device)
        taught = distillation_advantages(columns.rollout_logprobs, columns.teacher_logprobs, args.teacher_coef)
        columns.advantages = columns.advantages + taught * trained


def _kl_penalty(columns: TokenColumns, args: RunConfig) -> Tensor | None:
    """What is taken off each token's reward: kl_coef times the rollout policy's KL, so that what was sampled pays for it. On the CPU."""
    if not args.kl_coef or columns.ref_logprobs is None:
        return None
    divergence = kl(columns.rollout_logprobs.cpu(), columns.ref_logprobs.cpu(), args.kl_reward_estimator)
    return args.kl_coef * divergence * torch.from_numpy(columns.trained)


def _group_form(args: RunConfig) -> GroupForm:
    if args.advantage_estimator == "grpo" and args.grpo_std_normalization:
        return "std"
    return {"rloo": "leave_one_out", "maxrl": "mean_ratio"}.get(args.advantage_estimator, "mean")  # type: ignore[return-value]


def _compared_with_siblings(columns: TokenColumns, share: TrainShare, args: RunConfig, ranks: Ranks, penalty: Tensor | None) -> Tensor:
    """float32 [own samples]. A KL in the reward is that of the whole sample, gathered from all ranks."""
    batch, positions = share.batch, torch.tensor(share.positions)
    rewards = torch.tensor(batch.rewards, dtype=torch.float64)
    if penalty is not None:
        spent = torch.zeros(len(positions), dtype=torch.float64).index_add(0, columns.sample_of.cpu(), penalty.double())
        everyone = torch.zeros_like(rewards).index_add(0, positions, spent)
        rewards = rewards - ranks.sum(everyone.to(ranks.device)).cpu()
    return group_advantages(rewards.float(), torch.tensor(batch.group_indices), _group_form(args))[positions]


def _token_rewards(columns: TokenColumns, share: TrainShare, outcomes: Tensor, penalty: Tensor | None) -> Tensor:
    """float32 [own tokens] on the CPU: each sample's outcome on its last trained token, less the penalty."""
    rewards = torch.zeros(len(columns.trained))
    trained = torch.from_numpy(columns.trained)
    for sample, own in enumerate(_slices(share)):
        if trained[own].any():
            rewards[own] = outcome_rewards(float(outcomes[sample]), trained[own])
    return rewards if penalty is None else rewards - penalty


def _slices(share: TrainShare) -> list[slice]:
    offsets = share.data.offsets.tolist()
    return [slice(start, end) for start, end in pairwise(offsets)]


def _fill_returns(columns: TokenColumns, share: TrainShare, args: RunConfig, penalty: Tensor | None) -> None:
    """REINFORCE++: what is still to come at each token, of the reward or of its distance to the group's mean."""
    batch, positions = share.batch, torch.tensor(share.positions)
    outcomes = torch.tensor(batch.rewards)
    if args.advantage_estimator == "reinforce_plus_plus_baseline":
        outcomes = group_advantages(outcomes, torch.tensor(batch.group_indices), "mean")
    rewards = _token_rewards(columns, share, outcomes[positions], penalty)
    trained = torch.from_numpy(columns.trained)
    advantages = torch.zeros_like(rewards)
    for own in _slices(share):
        advantages[own] = discounted_returns(rewards[own], trained[own], args.gamma)
    columns.advantages = advantages.to(columns.weights.device)


def _fill_gae(columns: TokenColumns, share: TrainShare, args: RunConfig, penalty: Tensor | None, values: Tensor) -> None:
    """PPO: the reward stands at the sample's last trained token, both roles alike."""
    values = values.cpu()
    rewards = _token_rewards(columns, share, torch.tensor(share.data.rewards), penalty)
    trained = torch.from_numpy(columns.trained)
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    for own in _slices(share):
        advantages[own], returns[own] = gae(rewards[own], values[own], trained[own], args.gamma, args.gae_lambda)
    device = columns.weights.device
    columns.advantages, columns.returns, columns.old_values = advantages.to(device), returns.to(device), values.to(device)


def normalize_advantages(columns: TokenColumns, share: TrainShare, ranks: Ranks) -> None:
    """Bring the advantages of each optimizer step's trained tokens, over all ranks, to mean 0 and deviation 1."""
    step_of = np.repeat(share.batch.step_of[share.positions], np.diff(share.data.offsets))
    for step in range(share.num_steps):
        mask = torch.from_numpy(columns.trained & (step_of == step)).to(columns.advantages.device)
        total = ranks.sum(moments(columns.advantages, mask))
        columns.advantages = torch.where(mask, normalize(columns.advantages, mask, total), columns.advantages)


def samples_with(samples: list[int], column: np.ndarray, offsets: np.ndarray) -> list[int]:
    """Those samples that have a token at which `column` is not 0."""
    return [sample for sample in samples if column[offsets[sample] : offsets[sample + 1]].any()]
