"""The loss of a step is one number, and its gradient one vector, however the step is split."""

import random

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from miles.algorithms.aggregation import Aggregation, step_totals, token_weights

AGGREGATIONS: list[Aggregation] = ["token_mean", "sequence_mean", "constant"]


def reference_loss(aggregation: str, samples: list[list[float]], max_response_length: int) -> float:
    trained = [sample for sample in samples if sample]
    if not trained:
        return 0.0
    if aggregation == "token_mean":
        return sum(map(sum, trained)) / sum(map(len, trained))
    if aggregation == "sequence_mean":
        return sum(sum(sample) / len(sample) for sample in trained) / len(trained)
    return sum(map(sum, trained)) / (len(trained) * max_response_length)


SAMPLES = st.lists(st.lists(st.floats(-5, 5, width=32), max_size=8), min_size=1, max_size=10)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(samples=SAMPLES, ranks=st.integers(1, 4), accumulation=st.integers(1, 3), shuffler=st.randoms(use_true_random=False))
def test_any_split_gives_the_loss_of_the_formula(
    aggregation: Aggregation, samples: list[list[float]], ranks: int, accumulation: int, shuffler: random.Random
) -> None:
    tokens, count = step_totals(torch.tensor([len(sample) for sample in samples]))
    parts: list[list[list[float]]] = [[] for _ in range(ranks * accumulation)]
    for sample in samples:
        shuffler.choice(parts).append(sample)
    loss = 0.0
    for part in parts:
        weights = token_weights(aggregation, torch.tensor([len(sample) for sample in part]), tokens, count, 8)
        assert weights.dtype == torch.float64
        loss += sum(float(weight) * sum(sample) for weight, sample in zip(weights, part, strict=True))
    assert loss == pytest.approx(reference_loss(aggregation, samples, 8), rel=1e-12, abs=1e-12)


@pytest.mark.case("C40")
@pytest.mark.parametrize(
    "split",
    [
        [[[(2, 1.0), (8, 0.0)]]],  # one rank, one micro-batch
        [[[(2, 1.0)], [(8, 0.0)]]],  # one rank, two micro-batches
        [[[(2, 1.0)]], [[(8, 0.0)]]],  # two ranks
        [[[(1, 1.0)], [(1, 1.0)]], [[(3, 0.0)], [(5, 0.0)]]],  # two ranks, two micro-batches each, four samples
        [[[(2, 1.0)], [(3, 0.0)]], [[(5, 0.0)]]],  # three samples over two ranks
        [[[(2, 1.0), (8, 0.0)]], [[]]],  # a rank with nothing to do
    ],
)
def test_the_gradient_of_the_token_mean_is_a_fifth_under_any_split(split: list[list[list[tuple[int, float]]]]) -> None:
    every = [tokens for rank in split for micro_batch in rank for tokens, _ in micro_batch]
    tokens, count = step_totals(torch.tensor(every))
    gradient = 0.0
    for rank in split:
        weight = torch.tensor(1.0, requires_grad=True)
        for micro_batch in rank:
            weights = token_weights("token_mean", torch.tensor([n for n, _ in micro_batch]), tokens, count, 100)
            for share, (n, x) in zip(weights, micro_batch, strict=True):
                (share * (weight * torch.full((n,), x)).sum()).backward()
        gradient += float(weight.grad) if weight.grad is not None else 0.0
    assert gradient == pytest.approx(0.2, rel=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_sample_without_trained_tokens_changes_nothing(aggregation: Aggregation) -> None:
    with_it = torch.tensor([3, 0, 5])
    without = torch.tensor([3, 5])
    weights = token_weights(aggregation, with_it, *step_totals(with_it), 10)
    assert weights[1] == 0
    assert torch.equal(weights[[0, 2]], token_weights(aggregation, without, *step_totals(without), 10))


def test_the_three_weights() -> None:
    counts = torch.tensor([2, 8])
    assert token_weights("token_mean", counts, 10, 2, 16).tolist() == pytest.approx([0.1, 0.1])
    assert token_weights("sequence_mean", counts, 10, 2, 16).tolist() == pytest.approx([1 / 4, 1 / 16])
    assert token_weights("constant", counts, 10, 2, 16).tolist() == pytest.approx([1 / 32, 1 / 32])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_step_with_nothing_to_train_has_loss_0(aggregation: Aggregation) -> None:
    nothing = torch.tensor([0, 0])
    assert step_totals(nothing) == (0, 0)
    assert token_weights(aggregation, nothing, 0, 0, 10).tolist() == [0.0, 0.0]
    assert token_weights(aggregation, nothing[:0], 0, 0, 10).tolist() == []


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="2 samples have trained tokens, but the step's totals are 0 tokens"):
        token_weights("token_mean", torch.tensor([1, 2]), 0, 0, 10)
    with pytest.raises(ValueError, match="loss_aggregation 'mean'"):
        token_weights("mean", torch.tensor([1]), 1, 1, 10)  # type: ignore[arg-type]
