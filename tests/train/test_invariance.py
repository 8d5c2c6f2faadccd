"""Loss and gradient of every estimator, loss and correction: those of the formulas, under every split into ranks and micro-batches.

The trainer's own path (shares, columns, packing, passes, weighted sums) on a tiny model in float64, against the loops of
`reference.py` over a plain forward pass of each sample.
"""

import copy
import itertools
import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as rules

from miles.config.run_config import RunConfig
from miles.data.rollout_data import select, split
from miles.train.mesh import Ranks
from miles.train.micro_batches import PackingRule
from miles.train.trainer import Trainer
from miles.types import Likeliest, RolloutData
from tests.train.reference import Answer, Token, step_loss
from tests.train.rollouts import Store, make_data, make_trainer, settings

NEWEST = 3
HEAD = 5
ESTIMATORS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"grpo_std_normalization": False, "loss_aggregation": "constant", "max_response_length": 10},
    "rloo": {"advantage_estimator": "rloo", "kl_coef": 0.1},
    "maxrl": {"advantage_estimator": "maxrl"},
    "reinforce_plus_plus": {"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.05, "kl_reward_estimator": "k2", "gamma": 0.9},
    "reinforce_plus_plus_baseline": {"advantage_estimator": "reinforce_plus_plus_baseline"},
    "ppo": {"advantage_estimator": "ppo", "kl_coef": 0.1, "gae_lambda": 0.9, "normalize_advantages": True},
    "opd": {"advantage_estimator": "opd", "teacher_coef": 0.7},
    "grpo_with_teacher": {"teacher_coef": 0.3},
    "sft": {"advantage_estimator": "sft"},
}
LOSSES: dict[str, dict[str, Any]] = {
    "clipped": {"eps_clip_high": 0.28},
    "dual_clip": {"dual_clip": 1.4},
    "gspo": {"policy_loss": "gspo", "eps_clip": 0.05},
    "cispo": {"policy_loss": "cispo", "eps_clip": 1.0, "eps_clip_high": 0.5},
    "sapo": {"policy_loss": "sapo"},
}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "tis_token": {"use_tis": True, "tis_clip": 1.2},
    "tis_sequence": {"use_tis": True, "tis_level": "sequence", "tis_clip": 1.5},
    "tis_geometric": {"use_tis": True, "tis_level": "geometric", "tis_clip": 1.1},
    "icepop": {"use_tis": True, "tis_clip": 1.3, "mask_level": "token", "mask_low": 0.8, "mask_high": 1.3},
    "sequence_mask": {"mask_level": "sequence", "mask_low": 0.85, "mask_high": 1.2},
    "geometric_mask": {"mask_level": "geometric", "mask_low": 0.9, "mask_high": 1.15, "use_tis": True},
    "outliers": {"mask_outlier": 1.3},
    "staleness": {"staleness_decay": 0.7, "use_tis": True, "tis_clip": 1.2},
    "centering": {"score_centering": HEAD, "staleness_decay": 0.7},
    "centering_tis": {"score_centering": HEAD, "use_tis": True, "tis_clip": 1.1},
    "centering_band": {"score_centering": HEAD, "mask_level": "token", "mask_low": 0.8, "mask_high": 1.3},
}
EXTRAS: list[dict[str, Any]] = [
    {},
    {"loss_aggregation": "sequence_mean"},
    {"kl_loss_coef": 0.3, "kl_estimator": "k3"},
    {"kl_loss_coef": 0.2, "kl_estimator": "k2", "entropy_coef": 0.05},
    {"loss_aggregation": "constant", "max_response_length": 16},
]


class ThreadRanks(Ranks):
    """Ranks that are threads of this process: they meet at a barrier where processes would meet in a collective."""

    def __init__(self, rank: int, meeting: threading.Barrier, table: list[torch.Tensor]) -> None:
        super().__init__(rank, meeting.parties, torch.device("cpu"))
        self.meeting, self.table = meeting, table

    def _all(self, values: torch.Tensor) -> torch.Tensor:
        self.table[self.rank] = values.clone()
        self.meeting.wait(60)
        found = torch.stack(list(self.table))
        self.meeting.wait(60)
        return found

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values.copy_(self._all(values).sum(0))

    def max(self, values: torch.Tensor) -> torch.Tensor:
        return values.copy_(self._all(values).amax(0))


@pytest.fixture(scope="module")
def trainer(tiny: str) -> Iterator[Trainer]:
    """A trained model in float64 that is not quite the checkpoint, which is the reference and the teacher."""
    made = make_trainer(settings(tiny, teacher_checkpoint=tiny), Store())
    generator = torch.Generator().manual_seed(1)
    made.model.double()
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.02)
        made.frozen.get("reference").double()
        made.frozen.get("teacher").double()
        for parameter in made.frozen.get("teacher").parameters():
            parameter.mul_(1.05)
    made.version = NEWEST
    yield made
    made.dispose()


def distributions(hf: torch.nn.Module, data: RolloutData, sample: int) -> torch.Tensor:
    """[tokens but the first, vocabulary] log-probs by transformers itself."""
    ids = torch.tensor(data.token_ids[data.offsets[sample] : data.offsets[sample + 1]], dtype=torch.long)
    return hf(ids[None]).logits[0, :-1].log_softmax(-1)


def plain_pass(hf: torch.nn.Module, data: RolloutData, sample: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of all tokens but the first of a sample."""
    logp = distributions(hf, data, sample)
    ids = torch.tensor(data.token_ids[data.offsets[sample] + 1 : data.offsets[sample + 1]], dtype=torch.long)
    return logp.gather(-1, ids[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@dataclass
class Batch:
    """A batch whose rollout log-probs lie near the policy's, of several weight versions, one sample unscored."""

    data: RolloutData
    values: np.ndarray  # float32 [tokens] a critic's
    frozen: dict[str, list[list[float]]]  # of reference and teacher: by sample, log-probs of all tokens but the first


def realistic(trainer: Trainer, seed: int) -> Batch:
    data = make_data(seed, groups=2, siblings=3, longest=6)
    rng = np.random.default_rng(seed)
    data.likeliest = Likeliest(np.zeros((len(data.token_ids), HEAD), np.int32), np.zeros((len(data.token_ids), HEAD), np.float32))
    with torch.no_grad():
        for s in range(data.num_samples):
            own = slice(int(data.offsets[s]) + 1, int(data.offsets[s + 1]))
            logprobs = plain_pass(trainer.model.hf, data, s)[0].numpy()
            noisy = np.minimum(logprobs + rng.normal(0, 0.25, len(logprobs)), 0.0)
            data.rollout_logprobs[own] = np.where(data.loss_mask[own], noisy, 0.0)
            logq = distributions(trainer.model.hf, data, s)
            logq = (logq + torch.from_numpy(rng.normal(0, 0.4, logq.shape))).log_softmax(-1)
            values, ids = logq.topk(HEAD, -1)
            data.likeliest.ids[own], data.likeliest.logprobs[own] = ids.numpy(), values.numpy()
            data.weight_versions[own] = np.where(data.loss_mask[own], rng.integers(0, NEWEST + 1), -1)
    data.rewards[rng.integers(data.num_samples)] = np.nan
    frozen = {}
    with torch.no_grad():
        for part in ("reference", "teacher"):
            hf = trainer.frozen.get(part).hf
            frozen[part] = [plain_pass(hf, data, s)[0].tolist() for s in range(data.num_samples)]
    return Batch(data, rng.normal(0, 1, len(data.token_ids)).astype(np.float32), frozen)


@pytest.fixture(scope="module")
def batches(trainer: Trainer) -> list[Batch]:
    return [realistic(trainer, seed) for seed in range(4)]


def expected(trainer: Trainer, batch: Batch, args: RunConfig) -> tuple[float, list[torch.Tensor]]:
    answers, data, values = [], batch.data, batch.values
    for s in range(data.num_samples):
        answer = Answer(int(data.group_indices[s]), float(data.rewards[s]))
        logp = distributions(trainer.model.hf, data, s)
        logprobs, entropies = plain_pass(trainer.model.hf, data, s)
        refs, teachers = batch.frozen["reference"][s], batch.frozen["teacher"][s]
        start = int(data.offsets[s]) + 1
        for i in np.flatnonzero(data.loss_mask[start : int(data.offsets[s + 1])]):
            place = start + int(i)
            lag = NEWEST - int(data.weight_versions[place])
            token = Token(logprobs[i], entropies[i], float(data.rollout_logprobs[place]), lag, refs[i], teachers[i], float(values[place]))
            heads = zip(data.likeliest.ids[place].tolist(), data.likeliest.logprobs[place].tolist(), strict=True)
            token.head = [(logp[i, v], q) for v, q in heads]
            answer.tokens.append(token)
        answers.append(answer)
    loss = step_loss(answers, args)
    return loss.item(), list(torch.autograd.grad(loss, list(trainer.model.parameters()), allow_unused=True))


def computed(trainer: Trainer, data: RolloutData, values: np.ndarray, args: RunConfig, num_ranks: int) -> tuple[float, list[torch.Tensor]]:
    """The sums over ranks of what each rank's trainer adds up."""
    meeting, table = threading.Barrier(num_ranks), [torch.zeros(0)] * num_ranks
    members = []
    for rank, share in enumerate(split(data, num_ranks, data.num_samples, 0, NEWEST)):
        member = copy.copy(trainer)
        member.args, member.ranks = args, ThreadRanks(rank, meeting, table)
        member.rule = PackingRule(args.max_tokens_per_micro_batch, args.share_prompts, True, trainer.rule.hidden_size)
        tokens = [np.arange(data.offsets[p], data.offsets[p + 1]) for p in share.positions]
        own = torch.tensor(values[np.concatenate(tokens)]) if tokens else torch.zeros(0)
        members.append((member, share, own if args.use_critic else None))
    with ThreadPoolExecutor(num_ranks) as pool:
        prepared = list(pool.map(lambda each: each[0]._prepare(each[1], each[2]), members))
    trainer.model.zero_grad()
    total = 0.0
    for (member, *_), (columns, steps) in zip(members, prepared, strict=True):
        for batches, base in zip(steps, member._ratio_bases(steps, columns), strict=True):
            columns.old_logprobs = base
            total += sum(member._backward(batch, columns)["loss"].item() for batch in batches)
    return total, [p.grad if p.grad is not None else torch.zeros_like(p) for p in trainer.model.parameters()]


PAIRS = [(estimator, loss) for estimator, loss in itertools.product(ESTIMATORS, LOSSES) if estimator != "sft" or loss == "clipped"]


def check_agreement(trainer: Trainer, batch: Batch, made: dict[str, Any], order: list[int], num_ranks: int) -> None:
    if "teacher_coef" not in made:
        made["teacher_checkpoint"] = None
    args = trainer.args.model_copy(update=made)
    data, places = batch.data, np.array(order)
    want, gradients = expected(trainer, batch, args)
    tokens = np.concatenate([np.arange(data.offsets[p], data.offsets[p + 1]) for p in places])
    got, sums = computed(trainer, select(data, places), batch.values[tokens], args, num_ranks)
    assert got == pytest.approx(want, rel=1e-6, abs=1e-6)
    scale = max(float(g.abs().max()) for g in gradients if g is not None)
    assert math.isfinite(scale)
    for wanted, found in zip(gradients, sums, strict=True):
        assert wanted is None or float((wanted - found).abs().max()) <= 1e-6 * max(1.0, scale)


@pytest.mark.case("C40")
@pytest.mark.parametrize("case", range(len(PAIRS)), ids=[f"{estimator}-{loss}" for estimator, loss in PAIRS])
def test_every_estimator_with_every_loss_is_that_of_the_formulas(trainer: Trainer, batches: list[Batch], case: int) -> None:
    """Corrections, bases and splits take turns, so that each of them meets many of the pairs."""
    estimator, loss = PAIRS[case]
    corrections = list(CORRECTIONS.values())
    made = ESTIMATORS[estimator] | LOSSES[loss] | corrections[case % len(corrections)] | EXTRAS[case % len(EXTRAS)]
    made |= {"use_rollout_logprobs": case % 2 == 1, "max_tokens_per_micro_batch": 40, "share_prompts": case % 4 < 2}
    batch = batches[case % len(batches)]
    order = np.random.default_rng(case).permutation(batch.data.num_samples).tolist()
    check_agreement(trainer, batch, made, order, num_ranks=1 + case % 3)


@pytest.mark.case("C40")
@rules(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(draw=st.data())
def test_any_split_gives_the_loss_and_gradient_of_the_formulas(trainer: Trainer, batches: list[Batch], draw: Any) -> None:
    batch = batches[draw.draw(st.integers(0, len(batches) - 1), "batch")]
    estimator, loss = draw.draw(st.sampled_from(PAIRS), "estimator and loss")
    correction = draw.draw(st.sampled_from(list(CORRECTIONS)), "correction")
    made = ESTIMATORS[estimator] | LOSSES[loss] | CORRECTIONS[correction] | draw.draw(st.sampled_from(EXTRAS), "extra")
    made |= {
        "use_rollout_logprobs": draw.draw(st.booleans(), "rollout log-probs as the base"),
        "max_tokens_per_micro_batch": draw.draw(st.sampled_from([8, 40, 90, 4096]), "micro-batch"),
        "share_prompts": draw.draw(st.booleans(), "share prompts"),
    }
    order = draw.draw(st.permutations(range(batch.data.num_samples)), "order")
    check_agreement(trainer, batch, made, order, draw.draw(st.integers(1, 3), "ranks"))


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_every_correction_does_something(trainer: Trainer, batches: list[Batch], correction: str) -> None:
    """So that the test above compares no corrections that leave everything as it is."""
    plain = trainer.args.model_copy(update={"teacher_checkpoint": None})
    corrected = plain.model_copy(update=CORRECTIONS[correction])
    losses = [[computed(trainer, batch.data, batch.values, args, 1)[0] for args in (plain, corrected)] for batch in batches]
    assert all(before == pytest.approx(after, rel=1e-6) for before, after in losses) == (correction == "none")
