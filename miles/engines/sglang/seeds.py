"""A seed for each request, in the server: its tokens then depend on its seed and its place, not on who else is in the batch.

SGLang's sampler takes a seed for each row, but its scheduler hands them on only together with batch-invariant kernels, which
are far slower, and draws with a hash of every entry of the vocabulary. Here the seeds alone are handed on, and each row draws
one uniform number that its distribution is inverted at, as the embedded engine does.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from sglang.srt.layers import sampler
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from torch import Tensor

from miles.engines.embedded.sampling import block_sums, invert

_from_schedule_batch = SamplingBatchInfo.from_schedule_batch
_sample_truncated = sampler.top_k_top_p_min_p_sampling_from_probs_torch


def install() -> None:
    """Idempotent. Before the first request: rows with and without a seed cannot share a batch."""
    SamplingBatchInfo.from_schedule_batch = staticmethod(_with_seeds)
    sampler.multinomial_with_seed = _draw
    sampler.top_k_top_p_min_p_sampling_from_probs_torch = _truncated


def _with_seeds(batch: Any, vocab_size: int) -> SamplingBatchInfo:
    info = _from_schedule_batch(batch, vocab_size)
    if info.sampling_seed is None:
        seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
        # a request without a seed is random, as it would be without this file
        values = [random.getrandbits(62) if seed is None else seed for seed in seeds]
        info.sampling_seed = torch.tensor(values, dtype=torch.int64).to(batch.device, non_blocking=True)
    return info


def _draw(logprobs: Tensor, seed: Tensor, positions: Tensor) -> Tensor:
    """logprobs [rows, entries], -inf for what is left out; seed, positions [rows]. Returns int64 [rows, 1]."""
    weights = logprobs.float().exp()
    return invert(weights, block_sums(weights), uniforms(seed, positions)[:, None])[:, None]


def _truncated(probs: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor, *rest: Any, **options: Any) -> Any:
    """What a batch goes through when any of its rows is cut. Drawn in the order of the vocabulary, as rows of other batches are."""
    min_p, seed, positions = rest
    if seed is None or options.get("return_filtered_probs"):
        return _sample_truncated(probs, top_ks, top_ps, min_ps, *rest, **options)
    ordered, index = probs.sort(dim=-1, descending=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    top_p = top_ps[:, None]
    keep = (rank < top_ks[:, None]) & ((ordered.cumsum(-1) - ordered < top_p) | (top_p >= 1))
    if min_p:
        keep &= ordered >= ordered[:, :1] * min_ps[:, None]
    kept = torch.zeros_like(probs).scatter_(-1, index, ordered.masked_fill_(~keep, 0.0))
    return invert(kept, block_sums(kept), uniforms(seed, positions)[:, None]).to(torch.int32)


def uniforms(seed: Tensor, positions: Tensor) -> Tensor:
    """One number in (0, 1) for each row, float64 [rows]: the embedded engine's, on any device and without waiting for it."""
    golden = _signed(0x9E3779B97F4A7C15)
    bits = _mix(_mix(seed.long() + golden) + golden * (positions.long() + 1))
    return (_shifted(bits, 12).double() + 0.5) * 2.0**-52


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014), modulo 2^64 in int64."""
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
