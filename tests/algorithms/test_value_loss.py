"""The critic's clipped loss against a loop of floats."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from miles.algorithms.value_loss import clipped_value_loss

NUMBERS = st.floats(-5, 5)


def reference(value: float, old: float, target: float, clip: float) -> tuple[float, float]:
    limited = max(min(value, old + clip), old - clip)
    if (limited - target) ** 2 > (value - target) ** 2:
        return 0.5 * (limited - target) ** 2, 0.0
    return 0.5 * (value - target) ** 2, value - target


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=10), st.floats(0.01, 3))
def test_value_and_gradient(tokens: list[tuple[float, float, float]], clip: float) -> None:
    values, old, returns = (torch.tensor(column, dtype=torch.float64, requires_grad=True) for column in zip(*tokens, strict=True))
    loss = clipped_value_loss(values, old, returns, clip)
    loss.sum().backward()
    expected = [reference(*token, clip) for token in tokens]
    assert loss.tolist() == pytest.approx([each[0] for each in expected], rel=1e-12, abs=1e-15)
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([each[1] for each in expected], rel=1e-12, abs=1e-15)
    assert old.grad is None
    assert returns.grad is None


def test_half_types_are_computed_in_float32() -> None:
    half = torch.tensor([1.0, 300.0], dtype=torch.bfloat16, requires_grad=True)
    loss = clipped_value_loss(half, torch.zeros(2), torch.ones(2), 0.2)
    assert loss.dtype == torch.float32
    loss.sum().backward()
    assert half.grad is not None
    assert half.grad.isfinite().all()
