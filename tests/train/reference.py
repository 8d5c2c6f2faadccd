"""The whole loss of an optimizer step, written from the formulas as loops over samples and tokens, without any packing.

Only the log-probs and entropies that gradients flow through are tensors, one float64 scalar per trained token; all else is
Python floats. It shares no code with what it is compared with.
"""

import math
from dataclasses import dataclass, field

import torch

from miles.config.run_config import RunConfig


@dataclass
class Token:
    logprob: torch.Tensor
    entropy: torch.Tensor
    rollout: float
    lag: int
    ref: float = 0.0
    teacher: float = 0.0
    value: float = 0.0
    advantage: float = 0.0
    head: list[tuple[torch.Tensor, float]] = field(default_factory=list)  # the sampler's likeliest tokens: log p, log q


@dataclass
class Answer:
    """One sample; its trained tokens only."""

    group: int
    reward: float
    tokens: list[Token] = field(default_factory=list)


def kl(policy: float, reference: float, estimator: str) -> float:
    d = reference - policy
    return {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d, "k3_bounded": math.exp(d) - 1 - d}[estimator]


def fill_advantages(answers: list[Answer], args: RunConfig) -> None:
    scored = [a for a in answers if not math.isnan(a.reward)]
    estimator = args.advantage_estimator
    for answer in scored:
        penalties = [args.kl_coef * kl(t.rollout, t.ref, args.kl_reward_estimator) for t in answer.tokens]
        last = len(answer.tokens) - 1
        if estimator == "ppo":
            running, following = 0.0, 0.0
            for i in range(last, -1, -1):
                token = answer.tokens[i]
                reward = (answer.reward if i == last else 0.0) - penalties[i]
                running = reward + args.gamma * following - token.value + args.gamma * args.gae_lambda * running
                token.advantage, following = running, token.value
        elif estimator.startswith("reinforce_plus_plus"):
            outcome = compared(answer, scored, "mean", args) if estimator.endswith("baseline") else answer.reward
            for i, token in enumerate(answer.tokens):
                token.advantage = args.gamma ** (last - i) * outcome
                token.advantage -= math.fsum(args.gamma ** (j - i) * penalties[j] for j in range(i, last + 1))
        else:
            form = {"rloo": "others", "maxrl": "ratio", "grpo": "std" if args.grpo_std_normalization else "mean"}.get(estimator)
            for token in answer.tokens:
                token.advantage = compared(answer, scored, form, args) if form else float(estimator == "sft")
    every = [t for a in scored for t in a.tokens]
    if estimator.startswith("reinforce_plus_plus") or (estimator == "ppo" and args.normalize_advantages):
        mean = math.fsum(t.advantage for t in every) / len(every)
        spread = math.sqrt(math.fsum((t.advantage - mean) ** 2 for t in every) / len(every))
        for token in every:
            token.advantage = (token.advantage - mean) / spread if spread > 1e-9 else 0.0
    if args.teacher_checkpoint is not None:
        for token in every:
            token.advantage += args.teacher_coef * (token.teacher - token.rollout)


def compared(answer: Answer, scored: list[Answer], form: str, args: RunConfig) -> float:
    def spent(a: Answer) -> float:
        if args.advantage_estimator != "rloo":
            return 0.0
        return math.fsum(args.kl_coef * kl(t.rollout, t.ref, args.kl_reward_estimator) for t in a.tokens)

    own = answer.reward - spent(answer)
    siblings = [a.reward - spent(a) for a in scored if a.group == answer.group]
    if len(siblings) < 2 or max(siblings) - min(siblings) < 1e-6:
        return 0.0
    mean = math.fsum(siblings) / len(siblings)
    if form == "others":
        return own - (math.fsum(siblings) - own) / (len(siblings) - 1)
    if form == "std":
        return (own - mean) / math.sqrt(math.fsum((s - mean) ** 2 for s in siblings) / (len(siblings) - 1))
    return (own - mean) / (mean if form == "ratio" else 1.0)


def policy_loss(token: Token, base: float, whole: float, args: RunConfig) -> torch.Tensor:
    """whole: the mean log-ratio of the token's sample."""
    low, high = args.eps_clip, args.eps_clip if args.eps_clip_high is None else args.eps_clip_high
    a, new = token.advantage, token.logprob
    ratio = (new - base).exp()
    if args.policy_loss == "sapo":
        tau = args.sapo_tau_pos if a > 0 else args.sapo_tau_neg
        return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * a
    if args.policy_loss == "cispo":
        return -min(max(ratio.item(), 1 - low), 1 + high) * a * new
    if args.policy_loss == "gspo":
        ratio = math.exp(whole) * new.exp() / new.exp().detach()
    loss = torch.maximum(-ratio * a, -ratio.clamp(1 - low, 1 + high) * a)
    return torch.minimum(loss, loss.new_tensor(-args.dual_clip * a)) if args.dual_clip is not None and a < 0 else loss


def weight(token: Token, answer: Answer, train: list[float], i: int, args: RunConfig) -> float:
    """What corrections make of a token's policy loss. train: the trainer's log-probs of the sample's tokens."""
    gaps = [t - token.rollout for t, token in zip(train, answer.tokens, strict=True)]
    exponent = {"token": gaps[i], "sequence": math.fsum(gaps), "geometric": math.fsum(gaps) / len(gaps)}
    result = args.staleness_decay**token.lag
    if args.use_tis:
        result *= 1.0 if args.use_rollout_logprobs else min(math.exp(exponent[args.tis_level]), args.tis_clip)
    if args.mask_level is not None:
        ratio = math.exp(exponent[args.mask_level])
        if not (args.mask_low or 0.0) <= ratio <= (args.mask_high or math.inf):
            return 0.0
    if args.mask_outlier is not None and any(not 1 / args.mask_outlier <= math.exp(gap) <= args.mask_outlier for gap in gaps):
        return 0.0
    return result


def expected_score(token: Token, args: RunConfig) -> torch.Tensor:
    """E_q[w s] at this token as the gradient of a sum over the head, the tail of q taken for rho p (arXiv 2609.20807)."""

    def weight(ratio: float) -> float:
        inside = args.mask_level is None or (args.mask_low or 0.0) <= ratio <= (args.mask_high or math.inf)
        return (min(ratio, args.tis_clip) if args.use_tis else 1.0) * inside

    total = torch.zeros((), dtype=torch.float64)
    rho = (1 - math.fsum(math.exp(q) for _, q in token.head)) / (1 - math.fsum(p.exp().item() for p, _ in token.head))
    for log_p, log_q in token.head:
        p, q = log_p.exp().item(), math.exp(log_q)
        total = total + (q * weight(p / q) - rho * weight(1 / rho) * p) * log_p
    return total


def step_loss(answers: list[Answer], args: RunConfig) -> torch.Tensor:
    """The loss of all scored answers as one optimizer step, its ratio based on the policy itself or on the rollout log-probs."""
    fill_advantages(answers, args)
    scored = [a for a in answers if not math.isnan(a.reward) and a.tokens]
    num_tokens = sum(len(a.tokens) for a in scored)
    total = torch.zeros((), dtype=torch.float64)
    for answer in scored:
        share = {
            "token_mean": 1 / num_tokens,
            "sequence_mean": 1 / (len(answer.tokens) * len(scored)),
            "constant": 1 / (len(scored) * args.max_response_length),
        }[args.loss_aggregation]
        train = [t.logprob.item() for t in answer.tokens]
        bases = [t.rollout for t in answer.tokens] if args.use_rollout_logprobs else train
        whole = math.fsum(a - b for a, b in zip(train, bases, strict=True)) / len(train)
        for i, token in enumerate(answer.tokens):
            if args.advantage_estimator == "sft":
                loss = -token.logprob
            else:
                loss = policy_loss(token, bases[i], whole, args) * weight(token, answer, train, i, args)
                if args.score_centering:
                    loss = loss + args.staleness_decay**token.lag * token.advantage * expected_score(token, args)
            if args.kl_loss_coef:
                d = token.ref - token.logprob
                loss = loss + args.kl_loss_coef * {"k1": -d, "k2": d * d / 2}.get(args.kl_estimator, d.exp() - 1 - d)
            total = total + share * (loss - args.entropy_coef * token.entropy)
    return total
