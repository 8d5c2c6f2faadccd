"""The clipped surrogate against a loop of floats: value, gradient, what is reported, and extremes."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from miles.algorithms.policy_loss import clipped_policy_loss

LOGPROB = st.floats(-8, 0)
ADVANTAGE = st.floats(-3, 3, width=32)
EPS = st.floats(0.01, 0.9)


def reference(logprob: float, old: float, advantage: float, low: float, high: float) -> tuple[float, float, bool]:
    """Loss, derivative by logprob, whether the clip took the gradient away."""
    ratio = math.exp(logprob - old)
    limited = min(max(ratio, 1 - low), 1 + high)
    loss = -min(ratio * advantage, limited * advantage)
    clipped = (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low)
    return loss, 0.0 if clipped else -ratio * advantage, clipped


@given(st.lists(st.tuples(LOGPROB, LOGPROB, ADVANTAGE), min_size=1, max_size=10), EPS, EPS)
def test_value_gradient_and_report(tokens: list[tuple[float, float, float]], low: float, high: float) -> None:
    logprobs, old, advantages = (torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True))
    logprobs.requires_grad_()
    loss, report = clipped_policy_loss(logprobs, old, advantages, low, high)
    loss.sum().backward()
    expected = [reference(*token, low, high) for token in tokens]
    assert loss.tolist() == pytest.approx([each[0] for each in expected], rel=1e-12, abs=1e-15)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([each[1] for each in expected], rel=1e-12, abs=1e-15)
    assert report["clipped"].tolist() == [float(each[2]) for each in expected]
    assert report["ratio"].tolist() == pytest.approx([math.exp(a - b) for a, b, _ in tokens], rel=1e-12)
    assert not report["ratio"].requires_grad


def test_at_ratio_1_the_gradient_is_that_of_the_policy_gradient() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.0])
    loss, report = clipped_policy_loss(logprobs, logprobs.detach(), advantages, 0.2, 0.2)
    loss.sum().backward()
    assert loss.tolist() == [-1.0, 2.0, 0.0]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-1.0, 2.0, 0.0]
    assert report["clipped"].tolist() == [0.0] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("difference", [100.0, -100.0, 1e30, -1e30, math.inf, -math.inf])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_extreme_differences_are_finite_in_value_and_gradient(dtype: torch.dtype, difference: float, advantage: float) -> None:
    logprobs = torch.tensor([-1.0, difference], dtype=dtype, requires_grad=True)
    old = torch.tensor([-1.0, 0.0], dtype=dtype)
    loss, report = clipped_policy_loss(logprobs, old, torch.full((2,), advantage), 0.2, 0.28)
    loss.sum().backward()
    assert logprobs.grad is not None
    for values in (loss, logprobs.grad, report["ratio"]):
        assert values.isfinite().all()
    assert logprobs.grad[0] == -advantage


def test_no_gradient_through_the_base_or_the_advantages() -> None:
    leaves = [torch.tensor([-1.0], requires_grad=True) for _ in range(3)]
    clipped_policy_loss(*leaves, 0.2, 0.2)[0].sum().backward()
    assert [leaf.grad is not None for leaf in leaves] == [True, False, False]
