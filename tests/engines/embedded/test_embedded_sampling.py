"""Samplers against closed forms in float64 numpy."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from miles.engines.embedded import sampling
from miles.engines.embedded.sampling import CANDIDATES, Draw, uniforms
from miles.types import SamplingParams

PLAIN = SamplingParams(max_new_tokens=1)


def probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution that params ask for, one entry after another by the definitions. float64 [vocabulary]"""
    scaled = logits.astype(np.float64) / (params.temperature or 1.0)
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    if params.temperature == 0:
        return np.eye(len(p))[p.argmax()]
    order = np.argsort(-p, kind="stable")
    if params.top_k:
        p[order[params.top_k :]] = 0
        p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= params.top_p]] = 0
    p[p < params.min_p * p.max()] = 0
    return p / p.sum()


CASES = [
    {},
    {"temperature": 0.5},
    {"temperature": 0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_p": 0.6},
    {"top_p": 1e-9},
    {"min_p": 0.2},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.05, "temperature": 1.3},
    {"top_k": 10_000_000},
]


def sample(logits: torch.Tensor, draws: list[Draw]) -> tuple[list[int], list[float]]:
    drawn = sampling.sample(logits, draws)
    return [row.token for row in drawn], [row.logprob for row in drawn]


def test_the_likeliest_tokens_of_each_row_that_asks_for_them() -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(5)) * 2
    params = [replace(PLAIN, num_likeliest=4, temperature=0.5), PLAIN, replace(PLAIN, num_likeliest=300)]
    drawn = sampling.sample(logits, [Draw(each, 0) for each in params])
    assert drawn[1].likeliest is None
    for row, count, temperature in ((0, 4, 0.5), (2, 300, 1.0)):
        ids, logprobs = drawn[row].likeliest
        wanted = (logits[row].double() / temperature).log_softmax(-1)
        assert ids.tolist() == wanted.argsort(descending=True)[:count].tolist()
        np.testing.assert_allclose(logprobs, wanted[ids], atol=1e-6)
        assert (ids.dtype, logprobs.dtype) == (np.int32, np.float32)


@pytest.mark.parametrize("vocabulary", [7, 256, 300])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_frequencies_are_those_of_the_definition(case: dict, vocabulary: int) -> None:
    logits = np.random.default_rng(0).normal(size=vocabulary).astype(np.float32) * 2
    params = replace(PLAIN, **case)
    count = 8_000
    tokens, logprobs = sample(torch.from_numpy(logits).expand(count, -1), [Draw(replace(params, seed=seed), 3) for seed in range(count)])
    expected = probabilities(logits, params) * count
    seen = np.bincount(tokens, minlength=vocabulary)
    assert seen[expected == 0].sum() == 0, "a token that is cut off was sampled"
    often = expected >= 5
    rest = expected[~often].sum()
    observed, wanted = np.append(seen[often], seen[~often].sum()), np.append(expected[often], rest)
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    if len(wanted) > 1:
        assert stats.chisquare(observed, wanted).pvalue > 1e-4
    scaled = logits.astype(np.float64) / (params.temperature or 1.0)
    full = scaled - scaled.max() - np.log(np.exp(scaled - scaled.max()).sum())
    np.testing.assert_allclose(logprobs, full[tokens], atol=2e-6)


@pytest.mark.parametrize("vocabulary", [3, 255, 257, 5000])
def test_plain_sampling_inverts_the_cumulative_distribution(vocabulary: int) -> None:
    rows = 200
    logits = np.random.default_rng(1).normal(size=(rows, vocabulary)).astype(np.float32) * 3
    draws = [Draw(replace(PLAIN, seed=row * 17), row) for row in range(rows)]
    tokens, _ = sample(torch.from_numpy(logits), draws)
    weights = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    cumulative = weights.cumsum(-1)
    target = uniforms([row * 17 for row in range(rows)], list(range(rows))) * cumulative[:, -1]
    for row, token in enumerate(tokens):
        slack = 1e-6 * cumulative[row, -1]
        assert (cumulative[row, token - 1] if token else 0.0) - slack <= target[row] < cumulative[row, token] + slack


@pytest.mark.parametrize(
    "case", [{"top_p": 0.9999}, {"top_k": 2 * CANDIDATES}, {"min_p": 1e-7}, {"top_k": 2 * CANDIDATES, "top_p": 0.99}], ids=str
)
def test_truncation_beyond_the_first_candidates_is_exact(case: dict) -> None:
    vocabulary = 4 * CANDIDATES
    logits = np.random.default_rng(2).normal(size=vocabulary).astype(np.float32)
    params = replace(PLAIN, **case)
    tokens, _ = sample(torch.from_numpy(logits).expand(4000, -1), [Draw(replace(params, seed=seed), 0) for seed in range(4000)])
    allowed = probabilities(logits, params) > 0
    assert allowed[tokens].all()
    assert len(set(tokens)) > CANDIDATES / 2


def test_uniforms_are_uniform_and_independent_of_each_other() -> None:
    by_seed = uniforms(list(range(100_000)), [0] * 100_000)
    by_position = uniforms([12345] * 100_000, list(range(100_000)))
    for draws in (by_seed, by_position, (by_seed[1:] + by_seed[:-1]) % 1, (by_position[1:] - by_position[:-1]) % 1):
        assert stats.kstest(draws, "uniform").pvalue > 1e-3
        assert draws.min() > 0
        assert draws.max() < 1
    assert abs(np.corrcoef(by_seed, by_position)[0, 1]) < 0.02


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(16, 600, generator=torch.Generator().manual_seed(3)) * 2
    draws = [Draw(replace(PLAIN, seed=row, top_p=0.9 if row % 2 else 1.0, temperature=row % 3 / 2), row) for row in range(16)]
    together = sample(logits, draws)
    for row in range(16):
        alone = sample(logits[row : row + 1], draws[row : row + 1])
        assert (together[0][row], together[1][row]) == (alone[0][0], pytest.approx(alone[1][0], abs=1e-6))


def test_a_row_that_is_not_finite_says_so_and_spoils_no_other() -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(4))
    clean = sample(logits, [Draw(PLAIN, 0)] * 3)
    logits[1, 5] = float("nan")
    tokens, logprobs = sample(logits, [Draw(PLAIN, 0)] * 3)
    assert np.isnan(logprobs[1])
    assert (tokens[0], tokens[2]) == (clean[0][0], clean[0][2])


def test_masked_logits_are_never_sampled() -> None:
    logits = torch.full((2000, 300), float("-inf"))
    logits[:, [3, 299]] = 0.0
    tokens, _ = sample(logits, [Draw(replace(PLAIN, seed=seed), 0) for seed in range(2000)])
    assert set(tokens) == {3, 299}
