"""What each token of a share is trained towards: advantages, returns, and its weight in the loss."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from miles.algorithms.advantages import gae, group_advantages, moments, normalize, outcome_rewards
from miles.algorithms.aggregation import step_totals, token_weights
from miles.algorithms.kl import kl
from miles.config.run_config import RunConfig
from miles.train.mesh import Ranks
from miles.types import TrainShare


@dataclass(slots=True)
class TokenColumns:
    """float32 [own tokens] each, aligned with share.data.token_ids; 0 where `trained` is not set."""

    trained: np.ndarray  # bool [own tokens] the loss mask, without unscored samples and first tokens
    weights: Tensor  # in the loss of the token's optimizer step
    advantages: Tensor
    rollout_logprobs: Tensor
    versions: np.ndarray  # int32 [own tokens]
    old_logprobs: Tensor | None = None  # the ratio's base; None: the new ones before their step, so the ratio is 1
    ref_logprobs: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None


def token_columns(share: TrainShare, args: RunConfig, device: torch.device) -> TokenColumns:
    """The columns that need no model. Advantages of grpo and sft are complete, those of ppo still 0."""
    data = share.data
    lengths = np.diff(data.offsets)
    sample_of = np.repeat(np.arange(data.num_samples), lengths)
    trained = (data.loss_mask != 0) & ~np.isnan(data.rewards)[sample_of]
    trained[data.offsets[:-1][lengths > 0]] = False
    on_tokens = torch.from_numpy(trained)
    of = torch.from_numpy(sample_of)

    def spread(by_sample: Tensor) -> Tensor:
        return (by_sample.float()[of] * on_tokens).to(device)

    return TokenColumns(
        trained=trained,
        weights=spread(_sample_weights(share, args)),
        advantages=spread(_sample_advantages(share, args)),
        rollout_logprobs=torch.tensor(data.rollout_logprobs, device=device),
        versions=data.weight_versions,
    )


def _sample_advantages(share: TrainShare, args: RunConfig) -> Tensor:
    """[own samples]; groups are those of the whole batch, so any split gives the same numbers."""
    if args.advantage_estimator == "sft":
        return torch.ones(len(share.positions))
    if args.advantage_estimator == "ppo":
        return torch.zeros(len(share.positions))
    batch = share.batch
    rewards, groups = torch.tensor(batch.rewards), torch.tensor(batch.group_indices)
    return group_advantages(rewards, groups, args.grpo_std_normalization)[torch.tensor(share.positions)]


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


def fill_gae(columns: TokenColumns, share: TrainShare, values: Tensor, args: RunConfig) -> None:
    """PPO: advantages and returns of every trained token from the critic's `values`, float32 [own tokens].

    The reward stands at the sample's last trained token. With kl_coef, each trained token's reward is lowered by
    kl_coef times k1 of the rollout policy against the reference: what was sampled pays for it, in both roles alike.
    """
    data = share.data
    advantages, returns = torch.zeros(len(values)), torch.zeros(len(values))
    values = values.cpu()
    penalty = None
    if args.kl_coef and columns.ref_logprobs is not None:
        penalty = args.kl_coef * kl(columns.rollout_logprobs.cpu(), columns.ref_logprobs.cpu(), "k1")
    trained = torch.from_numpy(columns.trained)
    for sample in range(data.num_samples):
        own = slice(int(data.offsets[sample]), int(data.offsets[sample + 1]))
        mask = trained[own]
        if not mask.any():
            continue
        rewards = outcome_rewards(float(data.rewards[sample]), mask)
        if penalty is not None:
            rewards -= penalty[own] * mask
        advantages[own], returns[own] = gae(rewards, values[own], mask, args.gamma, args.gae_lambda)
    device = columns.weights.device
    columns.advantages, columns.returns, columns.old_values = advantages.to(device), returns.to(device), values.to(device)


def normalize_advantages(columns: TokenColumns, share: TrainShare, ranks: Ranks) -> None:
    """PPO: bring the advantages of each optimizer step's trained tokens, over all ranks, to mean 0 and deviation 1."""
    step_of = np.repeat(share.batch.step_of[share.positions], np.diff(share.data.offsets))
    for step in range(share.num_steps):
        mask = torch.from_numpy(columns.trained & (step_of == step)).to(columns.advantages.device)
        total = ranks.sum(moments(columns.advantages, mask))
        columns.advantages = torch.where(mask, normalize(columns.advantages, mask, total), columns.advantages)
