"""Importance weights, masks and staleness against loops of floats, and the reported cases."""

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from miles.algorithms.corrections import (
    Level,
    effective_sample_share,
    inside_band,
    ratios,
    staleness_weights,
    truncated_importance_weights,
    without_outliers,
)
from miles.algorithms.policy_loss import clipped_policy_loss
from miles.algorithms.segments import Segments

LEVELS: list[Level] = ["token", "sequence", "geometric"]
LOGPROB = st.floats(-15, 0)
SAMPLES = st.lists(st.lists(st.tuples(LOGPROB, LOGPROB), min_size=1, max_size=6), min_size=1, max_size=4)


def alone(tokens: int) -> Segments:
    """Each token a sample of its own."""
    return Segments.of(torch.arange(tokens))


def flat(samples: Any) -> tuple[torch.Tensor, torch.Tensor, Segments]:
    train, rollout = (torch.tensor([pair[i] for pairs in samples for pair in pairs], dtype=torch.float64) for i in (0, 1))
    return train, rollout, Segments.of(torch.tensor([s for s, pairs in enumerate(samples) for _ in pairs]))


def reference(samples: Any, level: Level) -> list[float]:
    """The ratio of every token by the definition."""
    result = []
    for pairs in samples:
        own = [a - b for a, b in pairs]
        whole = math.fsum(own) / (len(own) if level == "geometric" else 1)
        result += [math.exp(max(-20.0, min(20.0, each if level == "token" else whole))) for each in own]
    return result


@pytest.mark.case("C46")
def test_weights_are_cut_from_above_only_and_both_means_are_reported() -> None:
    train = torch.tensor([math.log(3), -1.0], requires_grad=True)
    weights, report = truncated_importance_weights(train, torch.zeros(2), 2.0, "token", alone(2))
    assert weights.tolist() == pytest.approx([2.0, 0.36788], abs=1e-5)
    assert report["raw"].tolist() == pytest.approx([3.0, 0.36788], abs=1e-5)
    assert not weights.requires_grad

    weights, report = truncated_importance_weights(torch.tensor([-0.5, 2.5, -0.2]), torch.zeros(3), 5.0, "token", alone(3))
    assert report["raw"].tolist() == pytest.approx([0.606531, 12.182494, 0.818731], abs=1e-5)
    assert float(report["raw"].mean()) == pytest.approx(4.53592, abs=1e-5)
    assert float(report["effective"].mean()) == pytest.approx(2.14175, abs=1e-5)


@pytest.mark.case("C46")
@pytest.mark.parametrize("level", LEVELS)
@given(logprobs=st.lists(st.floats(-10, 0, width=32), min_size=1, max_size=8))
def test_at_ratio_1_the_loss_and_its_gradient_are_those_without_correction(level: Level, logprobs: list[float]) -> None:
    policy = torch.tensor(logprobs, requires_grad=True)
    old, samples = policy.detach(), Segments.of(torch.arange(len(logprobs)) // 3)
    loss, _ = clipped_policy_loss(policy, old, torch.ones(len(logprobs)), 0.2, 0.2)
    weights, _ = truncated_importance_weights(old, old, 2.0, level, samples)
    (plain,) = torch.autograd.grad(loss.sum(), policy, retain_graph=True)
    (corrected,) = torch.autograd.grad((weights * loss).sum(), policy)
    assert torch.equal(weights * loss, loss)
    assert torch.equal(corrected, plain)
    assert inside_band(old, old, level, samples, low=1.0, high=1.0).all()
    assert without_outliers(old, old, 1.0001, samples).all()


@pytest.mark.parametrize("level", LEVELS)
@given(samples=SAMPLES, cap=st.floats(0.1, 10))
def test_weights_are_those_of_the_formula(level: Level, samples: Any, cap: float) -> None:
    train, rollout, segments = flat(samples)
    expected = reference(samples, level)
    weights, report = truncated_importance_weights(train, rollout, cap, level, segments)
    assert report["raw"].tolist() == pytest.approx(expected, rel=1e-9)
    assert weights.tolist() == pytest.approx([min(each, cap) for each in expected], rel=1e-9)


@pytest.mark.case("C46")
def test_a_sequences_weight_multiplies_its_loss_once() -> None:
    train, rollout = torch.tensor([0.1, 0.2, -0.3, 0.5]), torch.zeros(4)
    samples = Segments.of(torch.tensor([0, 0, 0, 1]))
    logprobs = train.clone().requires_grad_()
    loss, _ = clipped_policy_loss(logprobs, train, torch.tensor([1.0, 1.0, 1.0, -1.0]), 0.2, 0.2)
    plain = torch.autograd.grad(loss[:3].sum(), logprobs, retain_graph=True)[0]
    weights, _ = truncated_importance_weights(train, rollout, 2.0, "sequence", samples)
    assert weights.tolist() == pytest.approx([1.0] * 3 + [math.exp(0.5)])
    weights, _ = truncated_importance_weights(train + 0.2, rollout, 1.5, "sequence", samples)
    corrected = torch.autograd.grad((weights * loss)[:3].sum(), logprobs)[0]
    assert torch.allclose(corrected, 1.5 * plain), "the cap once, not to the power of the tokens"


@pytest.mark.parametrize("level", LEVELS)
@given(samples=SAMPLES, low=st.none() | st.floats(0.01, 1), high=st.none() | st.floats(1, 20))
def test_the_band_keeps_what_lies_in_it(level: Level, samples: Any, low: float | None, high: float | None) -> None:
    train, rollout, segments = flat(samples)
    ratio = ratios(train, rollout, level, segments).tolist()
    assert ratio == pytest.approx(reference(samples, level), rel=1e-9)
    expected = [(low is None or r >= low) and (high is None or r <= high) for r in ratio]
    assert inside_band(train, rollout, level, segments, low=low, high=high).tolist() == expected


@given(SAMPLES, st.floats(1.01, 100))
def test_one_outlier_rejects_its_sample(samples: Any, limit: float) -> None:
    train, rollout, segments = flat(samples)
    ratio = ratios(train, rollout, "token", segments)
    calm = ((ratio <= limit) & (ratio >= 1 / limit)).tolist()
    places = [s for s, pairs in enumerate(samples) for _ in pairs]
    expected = [all(ok for ok, other in zip(calm, places, strict=True) if other == s) for s in places]
    assert without_outliers(train, rollout, limit, segments).tolist() == expected


def test_a_weight_falls_with_every_publish() -> None:
    assert staleness_weights(torch.tensor([-1, 0, 1, 3]), 0.5).tolist() == [1.0, 1.0, 0.5, 0.125]
    assert staleness_weights(torch.tensor([0, 9]), 1.0).tolist() == [1.0, 1.0]


def test_the_effective_sample_share() -> None:
    for weights, share in (([2.0] * 5, 1.0), ([0.0, 0.0, 3.0, 0.0], 0.25), ([1.0, 3.0], 16 / 20)):
        assert effective_sample_share(sum(weights), sum(w * w for w in weights), len(weights)) == pytest.approx(share)
    assert math.isnan(effective_sample_share(0.0, 0.0, 0.0))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("difference", [100.0, -100.0, math.inf, -math.inf])
def test_extremes_are_finite(level: Level, dtype: torch.dtype, difference: float) -> None:
    weights, report = truncated_importance_weights(
        torch.tensor([difference], dtype=dtype), torch.zeros(1, dtype=dtype), 2.0, level, alone(1)
    )
    assert weights.dtype == torch.float32
    assert weights.isfinite().all()
    assert report["raw"].isfinite().all()


def test_an_unknown_level() -> None:
    with pytest.raises(ValueError, match="level 'group'"):
        ratios(torch.zeros(1), torch.zeros(1), "group", alone(1))  # type: ignore[arg-type]
