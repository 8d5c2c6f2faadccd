"""Truncated importance weights."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from miles.algorithms.corrections import truncated_importance_weights
from miles.algorithms.policy_loss import clipped_policy_loss


@pytest.mark.case("C46")
def test_weights_are_cut_from_above_only_and_both_means_are_reported() -> None:
    train = torch.tensor([math.log(3), -1.0], requires_grad=True)
    weights, report = truncated_importance_weights(train, torch.zeros(2), 2.0)
    assert weights.tolist() == pytest.approx([2.0, 0.36788], abs=1e-5)
    assert report["raw"].tolist() == pytest.approx([3.0, 0.36788], abs=1e-5)
    assert not weights.requires_grad

    weights, report = truncated_importance_weights(torch.tensor([-0.5, 2.5, -0.2]), torch.zeros(3), 5.0)
    assert report["raw"].tolist() == pytest.approx([0.606531, 12.182494, 0.818731], abs=1e-5)
    assert float(report["raw"].mean()) == pytest.approx(4.53592, abs=1e-5)
    assert float(report["effective"].mean()) == pytest.approx(2.14175, abs=1e-5)


@pytest.mark.case("C46")
@given(st.lists(st.floats(-10, 0, width=32), min_size=1, max_size=8))
def test_at_ratio_1_the_loss_and_its_gradient_are_those_without_correction(logprobs: list[float]) -> None:
    policy = torch.tensor(logprobs, requires_grad=True)
    old = policy.detach()
    loss, _ = clipped_policy_loss(policy, old, torch.ones(len(logprobs)), 0.2, 0.2)
    weights, _ = truncated_importance_weights(old, old, 2.0)
    (plain,) = torch.autograd.grad(loss.sum(), policy, retain_graph=True)
    (corrected,) = torch.autograd.grad((weights * loss).sum(), policy)
    assert torch.equal(weights * loss, loss)
    assert torch.equal(corrected, plain)


@given(st.lists(st.tuples(st.floats(-15, 0), st.floats(-15, 0)), min_size=1, max_size=8), st.floats(0.1, 10))
def test_weights_are_those_of_the_formula(tokens: list[tuple[float, float]], cap: float) -> None:
    train, rollout = (torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True))
    weights, report = truncated_importance_weights(train, rollout, cap)
    assert report["raw"].tolist() == pytest.approx([math.exp(a - b) for a, b in tokens], rel=1e-12)
    assert weights.tolist() == pytest.approx([min(math.exp(a - b), cap) for a, b in tokens], rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("difference", [100.0, -100.0, math.inf, -math.inf])
def test_extremes_are_finite(dtype: torch.dtype, difference: float) -> None:
    weights, report = truncated_importance_weights(torch.tensor([difference], dtype=dtype), torch.zeros(1, dtype=dtype), 2.0)
    assert weights.dtype == torch.float32
    assert weights.isfinite().all()
    assert report["raw"].isfinite().all()
