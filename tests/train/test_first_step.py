"""--verify-first-step in the trainer: each fault is provoked, and named as what it is."""

from typing import Any

import numpy as np
import pytest
import torch

from miles.protocols import FirstStepWrong
from miles.train.first_step import NOISE, FirstStep
from miles.train.trainer import Trainer
from miles.types import TrainShare
from tests.train.rollouts import Store, make_shares, make_trainer, settings

NEWEST = 2


def verifying(tiny: str, **changes: Any) -> Trainer:
    trainer = make_trainer(settings(tiny, verify_first_step=True, use_tis=True, **changes), Store())
    trainer.version = NEWEST
    return trainer


def logprobs_of(trainer: Trainer, share: TrainShare) -> np.ndarray:
    columns, steps = trainer._prepare(share, None)
    return trainer._evaluate(trainer.model, steps, columns).numpy()


def honest(trainer: Trainer, seed: int = 0, **shape: Any) -> TrainShare:
    """A share whose log-probs an engine with the trainer's weights would have given, which only rounding could tell apart."""
    (share,) = make_shares(seed, samples_per_step=trainer.args.samples_per_step, **shape)
    share.data.rollout_logprobs = logprobs_of(trainer, share)
    share.data.weight_versions[share.data.weight_versions >= 0] = NEWEST
    return share


def finding(trainer: Trainer, share: TrainShare) -> str:
    with pytest.raises(FirstStepWrong) as caught:
        trainer.train(0, trainer.store.put(share))
    return str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"keep_old_actor": True},
        {"use_rollout_logprobs": True},
        {"temperature": 0.7, "global_batch_size": 8},
        {"advantage_estimator": "sft"},
    ],
)
def test_an_honest_first_step_passes_and_says_what_was_measured(tiny: str, changes: dict[str, Any]) -> None:
    trainer = verifying(tiny, kl_loss_coef=0.1, **changes)
    share = honest(trainer)
    metrics = trainer.train(0, trainer.store.put(share)).metrics_per_step
    assert metrics[0]["verify/logprob_abs_diff"] < 1e-6
    assert metrics[0]["verify/reference_abs_diff_max"] < 1e-5
    deviation = metrics[0].get("train/ratio_deviation_max")
    assert (deviation is None) == ("advantage_estimator" in changes)
    assert not deviation or "use_rollout_logprobs" in changes
    share.data.rollout_logprobs -= 1.0  # later steps are not looked at
    assert "verify/logprob_abs_diff" not in trainer.train(1, trainer.store.put(share)).metrics_per_step[0]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_another_temperature_is_a_sampling_filter_and_is_named(tiny: str, temperature: float) -> None:
    engine, trainer = verifying(tiny, temperature=temperature), verifying(tiny, temperature=0.8)
    said = finding(trainer, honest(engine))
    assert "sampling filter" in said
    assert f"temperature {temperature:g}, not of --temperature 0.8" in said


def test_a_truncated_distribution_is_a_sampling_filter(tiny: str) -> None:
    trainer = verifying(tiny)
    share = honest(trainer)
    kept = np.random.default_rng(0).uniform(0.5, 1.0, len(share.data.rollout_logprobs)).astype(np.float32)
    share.data.rollout_logprobs -= np.log(kept) * (share.data.loss_mask > 0)
    assert "sampling filter" in (said := finding(trainer, share))
    assert "top-p, top-k, min-p" in said


def test_one_token_beyond_the_noise_is_a_fault(tiny: str) -> None:
    trainer = verifying(tiny)
    share = honest(trainer)
    place = int(np.flatnonzero(share.data.loss_mask)[0])
    share.data.rollout_logprobs[place] -= 1.2 * NOISE["float32"].largest  # the mean stays within
    assert "numerics" in (said := finding(trainer, share))
    assert "0.006 at most" in said


def test_a_ratio_that_its_own_pass_gives_is_exactly_1(tiny: str) -> None:
    trainer = verifying(tiny)
    share = honest(trainer)
    columns, steps = trainer._prepare(share, None)
    check = FirstStep(trainer.args, trainer.model, trainer.ranks, trainer.rule, share, columns, steps[0])
    rounding = {"train/ratio_deviation_max": 1e-6}
    check.check_ratio(rounding, exact=False)
    with pytest.raises(FirstStepWrong, match="1e-06 away from 1"):
        check.check_ratio(rounding, exact=True)


def test_tokens_of_older_weights_are_stale(tiny: str) -> None:
    trainer = verifying(tiny)
    old, share = honest(trainer), honest(trainer)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.02)
    share = honest(trainer)
    stale = np.zeros(len(share.data.token_ids), bool)
    stale[share.data.offsets[4] :] = True
    share.data.rollout_logprobs = np.where(stale, old.data.rollout_logprobs, share.data.rollout_logprobs)
    share.data.weight_versions[stale & (share.data.weight_versions >= 0)] = NEWEST - 1
    assert "staleness" in finding(trainer, share)


def test_stale_tokens_alone_are_no_fault(tiny: str) -> None:
    """Warm-up of a critic publishes the same weights again and again."""
    trainer = verifying(tiny)
    share = honest(trainer)
    share.data.weight_versions[share.data.weight_versions >= 0] = NEWEST - 1
    assert trainer.train(0, trainer.store.put(share)).metrics_per_step[0]["verify/logprob_abs_diff"] < 1e-6


@pytest.mark.parametrize("by", [1, -1])
def test_shifted_logprobs_are_tokenisation(tiny: str, by: int) -> None:
    trainer = verifying(tiny)
    share = honest(trainer, longest=24)
    share.data.rollout_logprobs = np.roll(share.data.rollout_logprobs, by)
    assert "tokenisation" in (said := finding(trainer, share))
    assert "shifted by one token" in said


def test_an_engine_that_computes_otherwise_is_numerics(tiny: str) -> None:
    trainer = verifying(tiny)
    share = honest(trainer)
    noise = np.random.default_rng(0).normal(0, 0.05, len(share.data.rollout_logprobs)).astype(np.float32)
    share.data.rollout_logprobs += noise * (share.data.loss_mask > 0)
    assert "numerics" in (said := finding(trainer, share))
    assert "a pass of single samples agrees with the trainer's packed one" in said


def test_a_packing_that_leaks_is_numerics_of_the_trainer(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = verifying(tiny)
    share = honest(trainer)

    def leaking(tree: Any, mask: np.ndarray) -> None:
        mask[:] = np.tri(len(mask), dtype=bool)  # siblings in one row see each other

    monkeypatch.setattr("miles.train.micro_batches._Tree.write_mask", leaking)
    assert "numerics" in (said := finding(trainer, share))
    assert "single samples agrees with the engines, the trainer's packed one does not" in said


def test_a_reference_that_is_another_model_is_seen(tiny: str) -> None:
    trainer = verifying(tiny, kl_loss_coef=0.1)
    share = honest(trainer)
    with torch.no_grad():
        for parameter in trainer.frozen.get("reference").parameters():
            parameter.mul_(1.1)
    assert "the KL is not 0" in finding(trainer, share)


def test_a_ratio_that_is_not_1_is_seen(tiny: str) -> None:
    trainer = verifying(tiny, keep_old_actor=True)
    share = honest(trainer)
    assert trainer.published is not None
    for kept in trainer.published.kept.values():
        kept.mul_(1.1)
    assert "away from 1" in finding(trainer, share)
