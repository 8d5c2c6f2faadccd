"""Entropy of next-token distributions."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from miles.algorithms.entropy import entropy


@given(st.lists(st.floats(-20, 20), min_size=1, max_size=9))
def test_value_is_that_of_the_formula(logits: list[float]) -> None:
    top = max(logits)
    weights = [math.exp(value - top) for value in logits]
    probabilities = [weight / math.fsum(weights) for weight in weights]
    expected = -math.fsum(p * math.log(p) for p in probabilities if p > 0)
    assert entropy(torch.tensor(logits, dtype=torch.float64)).item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=6))
def test_gradient_is_that_of_the_formula(values: list[float]) -> None:
    logits = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    result = entropy(logits)
    result.backward()
    probabilities = torch.softmax(logits.detach(), 0)
    expected = -probabilities * (probabilities.log() + result.detach())
    assert logits.grad is not None
    assert torch.allclose(logits.grad, expected, rtol=1e-9, atol=1e-12)


def test_impossible_tokens_and_shapes() -> None:
    logits = torch.tensor([[0.0, -math.inf, 0.0], [500.0, -500.0, -math.inf]], dtype=torch.bfloat16, requires_grad=True)
    result = entropy(logits)
    result.sum().backward()
    assert result.tolist() == pytest.approx([math.log(2), 0.0])
    assert result.dtype == torch.float32
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert entropy(torch.zeros(2, 5, 8)).shape == (2, 5)
    assert entropy(torch.zeros(7)).item() == pytest.approx(math.log(7))
