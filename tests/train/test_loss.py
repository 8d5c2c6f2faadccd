"""What a micro-batch adds up: rejected tokens, weights, distances, each token by token, by sample and by weight lag."""

from typing import Any

import numpy as np
import pytest
import torch

from miles.config.run_config import RunConfig
from miles.train.loss import Sums, actor_loss, critic_loss
from miles.train.mesh import Ranks
from miles.train.metrics import StepFacts, step_metrics
from miles.train.targets import TokenColumns

ROLLOUT = [-1.0, -2.0, -1.0, -0.5, -3.0]
GAPS = [0.0, 1.0, -1.0, 0.2, -2.0]  # trainer minus rollout
SAMPLES = [0, 0, 0, 1, 1]
LAGS = [0, 0, 1, 1, 12]


def columns(**changes: Any) -> TokenColumns:
    tokens = len(ROLLOUT)
    made = {
        "trained": np.ones(tokens, bool),
        "weights": torch.full((tokens,), 1 / tokens),
        "advantages": torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0]),
        "rollout_logprobs": torch.tensor(ROLLOUT),
        "versions": np.zeros(tokens, np.int32),
        "sample_of": torch.tensor(SAMPLES),
        "lags": torch.tensor(LAGS),
    }
    return TokenColumns(**(made | changes))


def computed(**settings: Any) -> tuple[torch.Tensor, Sums, torch.Tensor]:
    """Loss, sums, and the gradient by each token's log-prob."""
    logprobs = (torch.tensor(ROLLOUT) + torch.tensor(GAPS)).requires_grad_()
    loss, sums = actor_loss(logprobs, torch.zeros(5), columns(), torch.arange(5), RunConfig(**settings))
    return loss.detach(), sums, torch.autograd.grad(loss, logprobs)[0]


def metrics(sums: Sums) -> dict[str, float]:
    facts = StepFacts("actor", np.zeros(5, np.int32), 0, 5, 5, 1.0, 1e-3, 1.0)
    return step_metrics({name: value.double() for name, value in sums.items()}, facts, Ranks(0, 1, torch.device("cpu")))


@pytest.mark.case("C46")
def test_a_rejected_token_adds_nothing_and_stays_in_the_denominator() -> None:
    _, _, plain = computed()
    loss, sums, gradient = computed(mask_level="token", mask_low=0.5, mask_high=2.0)
    kept = torch.tensor([True, False, False, True, False])
    assert torch.equal(gradient, torch.where(kept, plain, 0.0)), "the others count as they did"
    assert loss.item() == pytest.approx((-1.0 + 1.0) / 5)
    told = metrics(sums)
    assert told["train/rejected"] == pytest.approx(3 / 5)
    assert told["train/seq_rejected"] == 0
    assert [told[f"train/rejected/lag_{lag}"] for lag in (0, 1, 8)] == [0.5, 0.5, 1.0]


@pytest.mark.case("C46")
@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"mask_level": "sequence", "mask_low": 0.9}, [1, 1, 1, 0, 0]),  # e^0 and e^-1.8
        ({"mask_level": "geometric", "mask_high": 0.9}, [0, 0, 0, 1, 1]),  # e^0 and e^-0.9
        ({"mask_outlier": 3.0}, [1, 1, 1, 0, 0]),
        ({"mask_outlier": 2.0}, [0, 0, 0, 0, 0]),
        ({"mask_level": "token", "mask_high": 2.0, "mask_outlier": 3.0}, [1, 0, 1, 0, 0]),
    ],
)
def test_masks_of_whole_samples(settings: dict[str, Any], kept: list[int]) -> None:
    _, _, plain = computed()
    loss, sums, gradient = computed(**settings)
    assert torch.equal(gradient, plain * torch.tensor(kept))
    assert np.isfinite(loss.item())
    whole = [not any(kept[:3]), not any(kept[3:])]
    assert metrics(sums)["train/seq_rejected"] == sum(whole) / 2


@pytest.mark.case("C46")
def test_weights_are_told_raw_and_effective_per_token_sample_and_lag() -> None:
    raw = np.exp(GAPS)
    effective = np.minimum(raw, 2.0)
    _, sums, gradient = computed(use_tis=True, tis_clip=2.0)
    told = metrics(sums)
    assert gradient.tolist() == pytest.approx((effective * [-0.2, -0.2, -0.2, 0.2, 0.2]).tolist(), rel=1e-5)
    assert told["train/tis_weight_raw"] == pytest.approx(raw.mean(), rel=1e-5)
    assert told["train/tis_weight"] == pytest.approx(effective.mean(), rel=1e-5)
    assert told["train/tis_clip_fraction"] == pytest.approx(1 / 5)
    assert told["train/seq_tis_weight_raw"] == pytest.approx((raw[:3].mean() + raw[3:].mean()) / 2, rel=1e-5)
    assert told["train/seq_tis_weight"] == pytest.approx((effective[:3].mean() + effective[3:].mean()) / 2, rel=1e-5)
    assert told["train/tis_weight_raw/lag_0"] == pytest.approx(raw[:2].mean(), rel=1e-5)
    assert told["train/tis_weight/lag_1"] == pytest.approx(effective[2:4].mean(), rel=1e-5)
    assert told["train/tis_weight/lag_8"] == pytest.approx(effective[4], rel=1e-5), "8 is 8 or more"
    assert "train/tis_weight/lag_2" not in told


def test_effective_sample_sizes_and_distances() -> None:
    told = metrics(computed()[1])
    raw, whole = np.exp(GAPS), np.exp([0.0, -1.8])
    assert told["train/ess"] == pytest.approx(raw.sum() ** 2 / (5 * (raw**2).sum()), rel=1e-5)
    assert told["train/seq_ess"] == pytest.approx(whole.sum() ** 2 / (2 * (whole**2).sum()), rel=1e-5)
    assert told["train/rollout_kl"] == pytest.approx(np.mean([np.exp(gap) - 1 - gap for gap in GAPS]), rel=1e-5)
    assert told["train/seq_rollout_kl"] == pytest.approx(-sum(GAPS) / 2, rel=1e-5)
    assert told["train/train_rollout_logprob_abs_diff_max"] == pytest.approx(2.0)


def test_clips_and_gates_are_told_per_token_sample_and_known_lag() -> None:
    logprobs = (torch.tensor(ROLLOUT) + torch.tensor(GAPS)).requires_grad_()
    made = columns(old_logprobs=torch.tensor(ROLLOUT), lags=torch.tensor([-1, *LAGS[1:]]))
    clipped = metrics(actor_loss(logprobs, torch.zeros(5), made, torch.arange(5), RunConfig())[1])
    assert clipped["train/clip_fraction"] == pytest.approx(2 / 5), "the second is too likely for good, the last too unlikely for ill"
    assert [clipped[f"train/clip_fraction/lag_{lag}"] for lag in (0, 1, 8)] == [1.0, 0.0, 1.0], "the first one's lag is unknown"
    assert clipped["train/seq_clip_fraction"] == 1.0
    assert clipped["train/ratio_mean"] == pytest.approx(np.exp(GAPS).mean(), rel=1e-5)
    assert clipped["train/ratio_deviation_max"] == pytest.approx(np.e - 1, rel=1e-5)
    args = RunConfig(policy_loss="sapo", sapo_tau_pos=1.0, sapo_tau_neg=2.0)
    gated = metrics(actor_loss(logprobs, torch.zeros(5), made, torch.arange(5), args)[1])
    p = 1 / (1 + np.exp(-np.array([1, 1, 1, 2, 2]) * (np.exp(GAPS) - 1)))
    assert gated["train/gate"] == pytest.approx((4 * p * (1 - p)).mean(), rel=1e-5)
    assert gated["train/gate/lag_1"] == pytest.approx((4 * p * (1 - p))[2:4].mean(), rel=1e-5)


def test_the_critics_loss_is_clipped_and_its_errors_are_told() -> None:
    values = torch.tensor([0.5, 0.1, 0.0, 0.0, 0.0]).requires_grad_()
    returns = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0])
    made = columns(old_values=torch.zeros(5), returns=returns)
    loss, sums = critic_loss(values, made, torch.arange(5), RunConfig(value_clip=0.2))
    assert loss.item() == pytest.approx((0.5 * 0.8**2 + 0.5 * 0.9**2) / 5), "the first may only count as if it were 0.2"
    assert torch.autograd.grad(loss, values)[0].tolist() == pytest.approx([0.0, -0.9 / 5, 0.0, 0.0, 0.0])
    facts = StepFacts("critic", np.zeros(5, np.int32), 0, 5, 5, 1.0, 1e-3, 1.0)
    told = step_metrics({name: value.double() for name, value in sums.items()}, facts, Ranks(0, 1, torch.device("cpu")))
    assert told["train/value_explained_variance"] == pytest.approx(0.0), "values of 0 explain nothing"


def test_staleness_scales_each_token_by_its_own_lag() -> None:
    _, _, plain = computed()
    _, sums, gradient = computed(staleness_decay=0.5)
    assert gradient.tolist() == pytest.approx((plain * torch.tensor([1, 1, 0.5, 0.5, 0.5**12])).tolist())
    assert metrics(sums)["train/staleness_weight"] == pytest.approx((3 + 0.5**12) / 5)


def test_with_rollout_logprobs_as_the_base_masks_look_at_the_trained_policy() -> None:
    logprobs = (torch.tensor(ROLLOUT) + torch.tensor(GAPS)).requires_grad_()
    args = RunConfig(use_rollout_logprobs=True, mask_level="token", mask_high=2.0, eps_clip=10, use_tis=True)
    made = columns(old_logprobs=torch.tensor(ROLLOUT))
    loss, sums = actor_loss(logprobs, torch.zeros(5), made, torch.arange(5), args)
    gradient = torch.autograd.grad(loss, logprobs)[0]
    assert (gradient != 0).tolist() == [True, False, True, True, True]
    assert metrics(sums)["train/tis_weight"] == 1.0


@pytest.mark.parametrize("policy_loss", ["clipped", "gspo", "cispo", "sapo"])
def test_a_micro_batch_without_tokens_adds_nothing_and_has_the_same_names(policy_loss: str) -> None:
    settings = {"policy_loss": policy_loss, "use_tis": True, "mask_outlier": 2.0, "staleness_decay": 0.9}
    _, sums, _ = computed(**settings)
    nothing = torch.zeros(0, requires_grad=True)
    loss, empty = actor_loss(nothing, torch.zeros(0), columns(), torch.zeros(0, dtype=torch.long), RunConfig(**settings))
    assert loss.item() == 0
    assert empty.keys() == sums.keys()
    assert all(not value.any() for value in empty.values())
