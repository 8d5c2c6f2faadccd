"""Sums per sample, whatever the order of the tokens."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from miles.algorithms.segments import Segments


@given(st.lists(st.tuples(st.integers(-3, 3), st.floats(-100, 100)), max_size=20))
def test_sums_and_means_are_those_of_the_samples_tokens(tokens: list[tuple[int, float]]) -> None:
    ids = torch.tensor([sample for sample, _ in tokens], dtype=torch.int64)
    values = torch.tensor([value for _, value in tokens], dtype=torch.float64)
    segments = Segments.of(ids)
    own = {sample: [value for other, value in tokens if other == sample] for sample, _ in tokens}
    assert len(segments) == len(own)
    assert segments.spread(segments.sum(values)).tolist() == pytest.approx([math.fsum(own[s]) for s, _ in tokens], abs=1e-10)
    assert segments.spread(segments.mean(values)).tolist() == pytest.approx([math.fsum(own[s]) / len(own[s]) for s, _ in tokens], abs=1e-10)
    assert segments.spread(segments.any(values > 0)).tolist() == [any(value > 0 for value in own[s]) for s, _ in tokens]
    assert segments.spread(segments.all(values > 0)).tolist() == [all(value > 0 for value in own[s]) for s, _ in tokens]
