"""Logits and seeds into tokens and log-probs.

Each row draws one uniform number that is a function of its seed and position alone, and inverts its distribution there: a
sample depends on nothing else in the batch, and on no generator's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from miles.types import SamplingParams

BLOCK = 256
"""Vocabulary entries that are summed as one in the first of two looks; a full cumulative sum is far slower on a CPU."""
CANDIDATES = 1024
"""Likeliest entries that a truncated distribution is looked for among, before everything is sorted."""


class Draw(NamedTuple):
    """What one row is sampled with."""

    params: SamplingParams
    position: int  # place of the new token in its response


class Drawn(NamedTuple):
    """What became of one row."""

    token: int
    logprob: float
    likeliest: tuple[np.ndarray, np.ndarray] | None  # ids int32 and log-probs float32 [num_likeliest], the likeliest first


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64 bits that looks random."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """One number in (0, 1) per (seed, position), float64 [rows]; seeds are taken modulo 2**64."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    seed = np.array([value & 0xFFFFFFFFFFFFFFFF for value in seeds], dtype=np.uint64)
    place = np.array(positions, dtype=np.uint64)
    with np.errstate(over="ignore"):
        bits = _mix(_mix(seed + golden) + golden * (place + np.uint64(1)))
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[Drawn]:
    """Sample one token per row.

    Args:
        logits: [rows, vocabulary], any float type; computed with in float32.
        draws: [rows]

    Returns:
        [rows] tokens and log-probs under softmax(logits / temperature), before truncation (temperature 1 where greedy). A row
        whose logits are not finite gets log-prob NaN.
    """
    params = [draw.params for draw in draws]
    temperatures = [row.temperature or 1.0 for row in params]
    scaled = logits.float()
    if any(value != 1.0 for value in temperatures):
        scaled = scaled / torch.tensor(temperatures, device=logits.device)[:, None]
    top = scaled.amax(-1, keepdim=True)
    weights = (scaled - top).exp_()  # [rows, vocabulary] 1 at the likeliest
    blocks = block_sums(weights)
    total = blocks.sum(-1, keepdim=True)  # float64 [rows, 1]
    where = torch.from_numpy(uniforms([row.seed for row in params], [draw.position for draw in draws])).to(logits.device)[:, None]
    tokens = invert(weights, blocks, where)

    greedy = [i for i, row in enumerate(params) if row.temperature == 0]
    if greedy:
        tokens[greedy] = scaled[greedy].argmax(-1)
    cut = [i for i, row in enumerate(params) if row.temperature != 0 and (row.top_p < 1 or row.top_k > 0 or row.min_p > 0)]
    if cut:
        tokens[cut] = _sample_truncated(weights[cut], total[cut], where[cut], [params[i] for i in cut])
    logprobs = (scaled.gather(-1, tokens[:, None]) - top).double() - total.log()
    told = _likeliest(scaled, top + total.log(), [row.num_likeliest for row in params])
    return [Drawn(*row) for row in zip(tokens.tolist(), logprobs[:, 0].tolist(), told, strict=True)]


def _likeliest(scaled: torch.Tensor, log_total: torch.Tensor, counts: list[int]) -> list[tuple[np.ndarray, np.ndarray] | None]:
    """Of each row so many, None for 0."""
    rows = [row for row, count in enumerate(counts) if count]
    told: list[tuple[np.ndarray, np.ndarray] | None] = [None] * len(counts)
    if rows:
        values, ids = scaled[rows].topk(max(counts), -1)
        logprobs = (values.double() - log_total[rows]).float().cpu().numpy()
        for row, own_ids, own in zip(rows, ids.int().cpu().numpy(), logprobs, strict=True):
            told[row] = own_ids[: counts[row]], own[: counts[row]]
    return told


def block_sums(weights: torch.Tensor) -> torch.Tensor:
    """Sums of BLOCK neighbours, float64 [rows, blocks]; the last block may be shorter."""
    rows, vocabulary = weights.shape
    whole = vocabulary // BLOCK * BLOCK
    sums = weights[:, :whole].reshape(rows, -1, BLOCK).sum(-1).double()
    return sums if whole == vocabulary else torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True).double()], -1)


def invert(weights: torch.Tensor, blocks: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """The first entry at which the cumulative sum passes where x total: first its block, then inside it. int64 [rows]"""
    vocabulary = weights.shape[-1]
    cumulative = blocks.cumsum(-1)
    target = where * cumulative[:, -1:]
    block = torch.searchsorted(cumulative, target, right=True).clamp_(max=blocks.shape[-1] - 1)
    rest = target - (cumulative.gather(-1, block) - blocks.gather(-1, block))
    entries = block * BLOCK + torch.arange(BLOCK, device=weights.device)
    inside = weights.gather(-1, entries.clamp(max=vocabulary - 1)).double().masked_fill_(entries >= vocabulary, 0.0)
    return (block[:, 0] * BLOCK + _first_above(inside.cumsum(-1), rest)[:, 0]).clamp_(max=vocabulary - 1)


def _first_above(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The first index whose cumulative sum is above target; never an entry of weight 0, even where rounding puts target past the end."""
    last = cumulative[:, -1:]
    target = torch.minimum(target, torch.nextafter(last, torch.zeros_like(last)))
    return torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.shape[-1] - 1)


def _sample_truncated(weights: torch.Tensor, total: torch.Tensor, where: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Rows with top-k, top-p or min-p, in this order, each on what the one before left. int64 [rows]

    top-p (Holtzman et al. 2020) keeps the fewest likeliest entries whose mass reaches p; min-p (Nguyen et al. 2024) those of at
    least min_p times the likeliest one's probability.
    """
    rows, vocabulary = weights.shape
    device = weights.device
    top_k = torch.tensor([row.top_k or vocabulary for row in params], device=device)[:, None].clamp(max=vocabulary)
    top_p = torch.tensor([row.top_p for row in params], dtype=torch.float64, device=device)[:, None]
    min_p = torch.tensor([row.min_p for row in params], dtype=torch.float64, device=device)[:, None]
    candidates = min(vocabulary, CANDIDATES)
    while True:
        ordered, index = weights.topk(candidates, -1) if candidates < vocabulary else weights.sort(dim=-1, descending=True, stable=True)
        mass = ordered.double()
        cumulative = mass.cumsum(-1)
        kept_mass = torch.where(top_k < vocabulary, cumulative.gather(-1, top_k.clamp(max=candidates) - 1), total)
        tail_is_cut = (cumulative[:, -1:] >= top_p * total) | (mass[:, -1:] < min_p)
        enough = (top_k <= candidates) | ((top_k == vocabulary) & tail_is_cut)
        if candidates == vocabulary or bool(enough.all()):
            break
        candidates = vocabulary
    rank = torch.arange(candidates, device=device).expand(rows, -1)
    before = cumulative - mass
    keep = (rank < top_k) & (before < top_p * kept_mass) & (mass >= min_p)
    kept = mass.masked_fill(~keep, 0.0).cumsum(-1)
    return index.gather(-1, _first_above(kept, where * kept[:, -1:]))[:, 0]
