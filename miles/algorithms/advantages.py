"""How much better than expected: baselines from the group, returns of tokens, GAE over a critic's values, a teacher's word.

Everything here is computed in float64 and returned in the type of its input, without gradients.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

GroupForm = Literal["std", "mean", "leave_one_out", "mean_ratio"]
"""What a group's deviations from their mean are divided by; see `group_advantages`."""

_ROUNDING = 4  # units in the last place: a spread no larger than this is rounding, not signal
_NO_VARIANCE = 1e-13  # of the mean square: what float32 values and float64 sums of squares can lose


@torch.no_grad()
def group_advantages(rewards: Tensor, group_ids: Tensor, form: GroupForm) -> Tensor:
    """How far each reward is from those of its group, in one of four forms; n is the number of the group's scored samples.

    - std: (r - mean) / std (GRPO, arXiv 2402.03300). The standard deviation is the sample one (n - 1), as torch.std.
    - mean: r - mean (Dr.GRPO, arXiv 2503.20783).
    - leave_one_out: r - mean of the others = (r - mean) n / (n - 1) (RLOO, arXiv 2402.14740).
    - mean_ratio: (r - mean) / mean (MaxRL, arXiv 2602.02710), for rewards that are not negative.

    No epsilon is added to a divisor: a group whose rewards are equal up to rounding gets exactly 0, any other is divided
    by its true spread or mean.

    Args:
        rewards: [samples], NaN where unscored. Unscored samples stay out of everything and get 0.
        group_ids: [samples], any integers; siblings share one.
        form: one of the four.

    Returns:
        [samples], in the type of rewards. A group with a single scored sample gets 0.

    Raises:
        ValueError: a reward is infinite, or negative with mean_ratio, or the shapes differ.
    """
    _check_rewards(rewards, group_ids, form)
    if not len(rewards):
        return rewards.clone()
    group_of = torch.unique(group_ids, return_inverse=True)[1]  # [samples] 0 .. groups - 1
    scored = ~rewards.isnan()  # [samples]
    rows = rewards[scored].double()  # [scored]
    group = group_of[scored]  # [scored]
    groups = int(group_of.max()) + 1

    zeros = rows.new_zeros(groups)
    count = zeros.index_add(0, group, torch.ones_like(rows))  # [groups]
    mean = zeros.index_add(0, group, rows) / count.clamp(min=1)
    highest = zeros.scatter_reduce(0, group, rows, "amax", include_self=False)
    lowest = zeros.scatter_reduce(0, group, rows, "amin", include_self=False)
    unit = min(torch.finfo(rewards.dtype).eps, torch.finfo(torch.float32).eps)
    spread = highest - lowest > _ROUNDING * unit * highest.abs()  # [groups]

    deviation = rows - mean[group]  # [scored]
    if form == "std":
        variance = zeros.index_add(0, group, deviation.square()) / (count - 1).clamp(min=1)
        divisor = variance.sqrt()
    elif form == "leave_one_out":
        divisor = (count - 1) / count.clamp(min=1)
    else:
        divisor = mean if form == "mean_ratio" else torch.ones_like(mean)
    deviation = deviation / torch.where(spread, divisor, 1.0)[group]
    advantages = torch.zeros_like(rewards)
    advantages[scored] = torch.where(spread[group], deviation, 0.0).to(rewards.dtype)
    return advantages


def _check_rewards(rewards: Tensor, group_ids: Tensor, form: GroupForm) -> None:
    if rewards.shape != group_ids.shape or rewards.dim() != 1:
        raise ValueError(f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)} must be [samples] both")
    if rewards.isinf().any():
        raise ValueError(f"infinite rewards at samples {rewards.isinf().nonzero().flatten().tolist()}")
    if form == "mean_ratio" and (rewards < 0).any():
        below = (rewards < 0).nonzero().flatten().tolist()
        raise ValueError(f"--advantage-estimator maxrl divides by the mean reward: those of samples {below} are negative")
    if form not in ("std", "mean", "leave_one_out", "mean_ratio"):
        raise ValueError(f"form {form!r} is none of std, mean, leave_one_out, mean_ratio")


@torch.no_grad()
def outcome_rewards(reward: float, mask: Tensor) -> Tensor:
    """A sample's one reward as a row of token rewards: all of it on the last trained token.

    Args:
        reward: the sample's score.
        mask: [tokens], 1 on trained tokens.

    Returns:
        float32 [tokens]; all 0 when nothing is trained.
    """
    rewards = torch.zeros(len(mask), dtype=torch.float32, device=mask.device)
    trained = mask.nonzero().flatten()
    if len(trained):
        rewards[trained[-1]] = reward
    return rewards


@torch.no_grad()
def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """What is still to come at each trained token of one sample: its reward + gamma times the next trained token's return.

    The return of REINFORCE++ (arXiv 2501.03262), where rewards are the outcome on the last token less a KL on each.
    Tokens with mask 0 are skipped as if they were not there, as in `gae`.

    Args:
        rewards: [tokens], see `outcome_rewards`.
        mask: [tokens], 1 on trained tokens.
        gamma: discount.

    Returns:
        [tokens], 0 where mask is 0, in the type of rewards.
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)[0]


@torch.no_grad()
def distillation_advantages(logprobs: Tensor, teacher_logprobs: Tensor, coef: float) -> Tensor:
    """coef x (teacher's log-prob - the policy's) of each token that the policy sampled.

    Its mean under the policy is minus the reverse KL to the teacher, KL(policy || teacher), so the policy gradient with it
    is the gradient of that KL, token by token: on-policy distillation (GKD, arXiv 2306.13649; MiniLLM, arXiv 2306.08543).

    Args:
        logprobs: [tokens], of the policy that wrote them.
        teacher_logprobs: [tokens].
        coef: factor.

    Returns:
        [tokens], in the type of logprobs.
    """
    return (coef * (teacher_logprobs.double() - logprobs.double())).to(logprobs.dtype)


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438) over the trained tokens of one sample.

    Tokens with mask 0 (prompts, tool answers) are no steps of the policy: they are skipped as if they were not there,
    so neither their values, nor rewards or KL penalties laid on them, nor a power of gamma or lam enter. The value
    after the last trained token is 0, also for a response that the length limit cut off.

    Args:
        rewards: [tokens], see `outcome_rewards`.
        values: [tokens], the value before each token is chosen.
        mask: [tokens], 1 on trained tokens.
        gamma: discount.
        lam: lambda.

    Returns:
        advantages [tokens] and returns [tokens] (advantages + values), both 0 where mask is 0, in the type of values.
    """
    if not rewards.shape == values.shape == mask.shape or values.dim() != 1:
        raise ValueError(f"rewards {tuple(rewards.shape)}, values {tuple(values.shape)}, mask {tuple(mask.shape)} must be [tokens] all")
    trained = mask != 0  # [tokens]
    own_rewards = rewards[trained].double().tolist()
    own_values = values[trained].double().tolist()
    backwards: list[float] = []
    advantage, next_value = 0.0, 0.0
    for reward, value in zip(reversed(own_rewards), reversed(own_values), strict=True):
        advantage = reward + gamma * next_value - value + gamma * lam * advantage
        backwards.append(advantage)
        next_value = value
    own = torch.tensor(backwards[::-1], dtype=torch.float64, device=values.device)  # [trained]
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    advantages[trained] = own.to(values.dtype)
    returns[trained] = (own + values[trained].double()).to(values.dtype)
    return advantages, returns


@torch.no_grad()
def moments(advantages: Tensor, mask: Tensor) -> Tensor:
    """What `normalize` needs to know of one part of a batch: float64 [3] count, sum and sum of squares of trained tokens.

    The moments of several parts (samples, micro-batches, ranks) add up, so an all-reduce gives those of the whole.
    """
    own = advantages[mask != 0].double()
    return torch.stack((own.new_tensor(float(own.numel())), own.sum(), own.square().sum()))


@torch.no_grad()
def normalize(advantages: Tensor, mask: Tensor, total: Tensor) -> Tensor:
    """Advantages brought to mean 0 and (population) standard deviation 1 over all trained tokens of a step.

    Args:
        advantages: [tokens] of this part.
        mask: [tokens]; where it is 0 the result is 0.
        total: the added-up `moments` of all parts.

    Returns:
        [tokens], all 0 when the whole has no spread beyond rounding.
    """
    count, mean_sum, square_sum = total.double().tolist()
    if count == 0:
        return torch.zeros_like(advantages)
    mean, mean_square = mean_sum / count, square_sum / count
    variance = mean_square - mean * mean
    if variance <= _NO_VARIANCE * mean_square:
        return torch.zeros_like(advantages)
    return torch.where(mask != 0, (advantages.double() - mean) / variance**0.5, 0.0).to(advantages.dtype)
