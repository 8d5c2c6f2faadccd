"""The policy losses against loops of floats: value, gradient, what is reported, and extremes."""

import math
import random
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from miles.algorithms.policy_loss import Report, cispo_policy_loss, clipped_policy_loss, gspo_policy_loss, sapo_policy_loss
from miles.algorithms.segments import Segments

LOGPROB = st.floats(-8, 0)
ADVANTAGE = st.floats(-3, 3, width=32)
EPS = st.floats(0.01, 0.9)


def reference(  # noqa: PLR0917
    logprob: float, old: float, advantage: float, low: float, high: float, dual: float | None = None
) -> tuple[float, float, bool]:
    """Loss, derivative by logprob, whether a clip took the gradient away."""
    ratio = math.exp(logprob - old)
    limited = min(max(ratio, 1 - low), 1 + high)
    loss = -min(ratio * advantage, limited * advantage)
    clipped = (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low)
    if dual is not None and advantage < 0 and loss > -dual * advantage:
        loss, clipped = -dual * advantage, True
    return loss, 0.0 if clipped else -ratio * advantage, clipped


@given(st.lists(st.tuples(LOGPROB, LOGPROB, ADVANTAGE), min_size=1, max_size=10), EPS, EPS, st.none() | st.floats(2, 10))
def test_value_gradient_and_report(tokens: list[tuple[float, float, float]], low: float, high: float, dual: float | None) -> None:
    logprobs, old, advantages = (torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True))
    logprobs.requires_grad_()
    loss, report = clipped_policy_loss(logprobs, old, advantages, low, high, dual_clip=dual)
    loss.sum().backward()
    expected = [reference(*token, low, high, dual) for token in tokens]
    assert loss.tolist() == pytest.approx([each[0] for each in expected], rel=1e-12, abs=1e-15)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([each[1] for each in expected], rel=1e-12, abs=1e-15)
    assert report["clipped"].tolist() == [float(each[2]) for each in expected]
    assert report["ratio"].tolist() == pytest.approx([math.exp(a - b) for a, b, _ in tokens], rel=1e-12)
    assert not report["ratio"].requires_grad


Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, Report]]
LOSSES: dict[str, Loss] = {
    "clipped": lambda new, old, advantages, _: clipped_policy_loss(new, old, advantages, 0.2, 0.28),
    "dual": lambda new, old, advantages, _: clipped_policy_loss(new, old, advantages, 0.2, 0.28, dual_clip=3.0),
    "gspo": lambda new, old, advantages, ids: gspo_policy_loss(new, old, advantages, Segments.of(ids), eps_low=0.2, eps_high=0.28),
    "cispo": lambda new, old, advantages, _: cispo_policy_loss(new, old, advantages, 1.0, 4.0),
    "sapo": lambda new, old, advantages, _: sapo_policy_loss(new, old, advantages, 1.0, 1.05),
}


@pytest.mark.parametrize("name", LOSSES)
def test_at_ratio_1_the_gradient_is_that_of_the_policy_gradient(name: str) -> None:
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.0])
    loss, report = LOSSES[name](logprobs, logprobs.detach(), advantages, torch.tensor([5, 1, 5]))
    loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-1.0, 2.0, 0.0]
    assert report["ratio"].tolist() == [1.0] * 3
    assert not report.get("clipped", torch.zeros(1)).any()
    if name in ("clipped", "dual", "gspo"):
        assert loss.tolist() == [-1.0, 2.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("difference", [100.0, -100.0, 1e30, -1e30, math.inf, -math.inf])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("name", LOSSES)
def test_extreme_differences_are_finite_in_value_and_gradient(dtype: torch.dtype, difference: float, advantage: float, name: str) -> None:
    if name == "cispo" and math.isinf(difference):
        difference = math.copysign(1e37, difference)  # its loss is the log-prob itself, times a weight
    logprobs = torch.tensor([-1.0, difference], dtype=dtype, requires_grad=True)
    old = torch.tensor([-1.0, 0.0], dtype=dtype)
    loss, report = LOSSES[name](logprobs, old, torch.full((2,), advantage), torch.tensor([0, 1]))
    loss.sum().backward()
    assert logprobs.grad is not None
    for values in (loss, logprobs.grad, report["ratio"]):
        assert values.isfinite().all()
    assert logprobs.grad[0] == -advantage


@pytest.mark.parametrize("name", LOSSES)
def test_no_gradient_through_the_base_or_the_advantages(name: str) -> None:
    leaves = [torch.tensor([-1.0], requires_grad=True) for _ in range(3)]
    LOSSES[name](*leaves, torch.zeros(1))[0].sum().backward()
    assert [leaf.grad is not None for leaf in leaves] == [True, False, False]


SAMPLES = st.lists(st.tuples(ADVANTAGE, st.lists(st.tuples(LOGPROB, LOGPROB), min_size=1, max_size=6)), min_size=1, max_size=4)


@given(SAMPLES, EPS, EPS, st.none() | st.floats(2, 10), st.randoms(use_true_random=False))
def test_gspo_is_the_sequence_form_of_the_paper(samples: Any, low: float, high: float, dual: float | None, order: random.Random) -> None:
    """Loss of a sample: -min(s A, clip(s) A), s = (product of ratios)^(1 / tokens); its derivative by each log-prob s A / tokens."""
    tokens = [(s, place, advantage, *pair) for s, (advantage, pairs) in enumerate(samples) for place, pair in enumerate(pairs)]
    order.shuffle(tokens)
    ids = torch.tensor([token[0] for token in tokens])
    advantages, logprobs, old = (torch.tensor([token[i] for token in tokens], dtype=torch.float64) for i in (2, 3, 4))
    logprobs.requires_grad_()
    loss, report = gspo_policy_loss(logprobs, old, advantages, Segments.of(ids), eps_low=low, eps_high=high, dual_clip=dual)
    weight = torch.tensor([1 / len(samples[token[0]][1]) for token in tokens], dtype=torch.float64)
    (loss * weight).sum().backward()
    expected, derivatives = 0.0, []
    for s, _, advantage, *_ in tokens:
        pairs = samples[s][1]
        mean = math.fsum(a - b for a, b in pairs) / len(pairs)
        value, derivative, _ = reference(mean, 0.0, advantage, low, high, dual)
        expected += value / len(pairs)
        derivatives.append(derivative / len(pairs))
    assert (loss * weight).sum().item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(derivatives, rel=1e-9, abs=1e-12)
    assert not report["ratio"].requires_grad


@given(st.lists(st.tuples(LOGPROB, LOGPROB, ADVANTAGE), min_size=1, max_size=10), st.floats(0.01, 1.5), st.floats(0.01, 5))
def test_cispo_is_the_formula(tokens: list[tuple[float, float, float]], low: float, high: float) -> None:
    logprobs, old, advantages = (torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True))
    logprobs.requires_grad_()
    loss, report = cispo_policy_loss(logprobs, old, advantages, low, high)
    loss.sum().backward()
    weights = [min(max(math.exp(a - b), 1 - low, 0.0), 1 + high) for a, b, _ in tokens]
    assert loss.tolist() == pytest.approx([-w * t[2] * t[0] for w, t in zip(weights, tokens, strict=True)], rel=1e-9, abs=1e-12)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-w * t[2] for w, t in zip(weights, tokens, strict=True)], rel=1e-9, abs=1e-12)
    assert report["clipped"].tolist() == [float(not 1 - low <= math.exp(a - b) <= 1 + high) for a, b, _ in tokens]


@given(st.lists(st.tuples(LOGPROB, LOGPROB, ADVANTAGE), min_size=1, max_size=10), st.floats(0.1, 5), st.floats(0.1, 5))
def test_sapo_is_the_formula(tokens: list[tuple[float, float, float]], tau_pos: float, tau_neg: float) -> None:
    logprobs, old, advantages = (torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True))
    logprobs.requires_grad_()
    loss, report = sapo_policy_loss(logprobs, old, advantages, tau_pos, tau_neg)
    loss.sum().backward()
    values, derivatives, gates = [], [], []
    for a, b, advantage in tokens:
        ratio, tau = math.exp(a - b), tau_pos if advantage > 0 else tau_neg
        p = 1 / (1 + math.exp(-tau * (ratio - 1))) if tau * (ratio - 1) > -700 else 0.0
        values.append(-4 / tau * p * advantage)
        gates.append(4 * p * (1 - p))
        derivatives.append(-4 * p * (1 - p) * ratio * advantage)
    assert loss.tolist() == pytest.approx(values, rel=1e-9, abs=1e-12)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(derivatives, rel=1e-6, abs=1e-9)
    assert report["gate"].tolist() == pytest.approx(gates, rel=1e-6, abs=1e-12)
