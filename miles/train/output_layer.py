"""Log-probabilities and entropies of chosen tokens straight from hidden states, without the full logits of a batch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24
"""Logits computed at a time (states x vocabulary)."""
KEEP_ELEMENTS = 1 << 28
"""Up to so many probabilities are kept for the backward pass; past it they are computed again."""


class _TokenLogprobs(torch.autograd.Function):
    """Both outputs are of softmax(scale * hidden @ weight.T), in float32 (float64 for float64 inputs)."""

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any, hidden: Tensor, weight: Tensor, state_of: Tensor, targets: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        states, vocabulary = hidden.shape[0], weight.shape[0]
        rows = max(1, CHUNK_ELEMENTS // vocabulary)
        bounds = _token_bounds(state_of, states, rows)
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logprobs = torch.empty(targets.shape[0], dtype=wide, device=hidden.device)
        entropies = torch.empty(states, dtype=wide, device=hidden.device)
        keep = (ctx.needs_input_grad[0] or ctx.needs_input_grad[1]) and states * vocabulary <= KEEP_ELEMENTS
        kept = []
        for chunk, (first, last) in enumerate(bounds):
            start, end = chunk * rows, min(states, (chunk + 1) * rows)
            logits = _shifted_logits(hidden[start:end], weight, scale, wide)
            p = logits.exp()
            total = p.sum(-1, keepdim=True)
            log_total = total.log()[:, 0]
            logprobs[first:last] = logits[state_of[first:last] - start, targets[first:last]] - log_total[state_of[first:last] - start]
            p.div_(total)
            entropies[start:end] = log_total - torch.linalg.vecdot(p, logits)
            if keep:
                kept.append(p)
        ctx.save_for_backward(hidden, weight, state_of, targets, entropies, *kept)
        ctx.scale, ctx.rows, ctx.bounds = scale, rows, bounds
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        grad_logprobs, grad_entropies = grads
        hidden, weight, state_of, targets, entropies, *kept = ctx.saved_tensors
        states, wide = hidden.shape[0], entropies.dtype
        grad_hidden = torch.empty_like(hidden)
        grad_weight: Tensor | None = None
        per_state = torch.zeros(states, dtype=wide, device=hidden.device)
        if grad_logprobs is not None:
            per_state.index_add_(0, state_of, grad_logprobs)
        for chunk, (first, last) in enumerate(ctx.bounds):
            start, end = chunk * ctx.rows, min(states, (chunk + 1) * ctx.rows)
            p = kept[chunk] if kept else _probabilities(hidden[start:end], weight, ctx.scale, wide)
            factor = -per_state[start:end, None]
            if grad_entropies is None:
                grad_logits = p.mul_(factor)
            else:  # d entropy / d logit_j = -p_j (log p_j + entropy)
                slope = p.clamp_min(torch.finfo(wide).tiny).log_().add_(entropies[start:end, None]).mul_(grad_entropies[start:end, None])
                grad_logits = p.mul_(factor - slope)
            if grad_logprobs is not None:
                grad_logits.index_put_((state_of[first:last] - start, targets[first:last]), grad_logprobs[first:last], accumulate=True)
            if ctx.scale != 1.0:
                grad_logits.mul_(ctx.scale)
            grad_logits = grad_logits.to(hidden.dtype)
            torch.mm(grad_logits, weight, out=grad_hidden[start:end])
            if ctx.needs_input_grad[1]:
                if grad_weight is None:
                    grad_weight = grad_logits.T @ hidden[start:end]
                else:
                    grad_weight.addmm_(grad_logits.T, hidden[start:end])
        if ctx.needs_input_grad[1] and grad_weight is None:
            grad_weight = torch.zeros_like(weight)
        return grad_hidden, grad_weight, None, None, None


def _shifted_logits(hidden: Tensor, weight: Tensor, scale: float, wide: torch.dtype) -> Tensor:
    """Scaled logits minus the largest of their state.

    The sum of their exponentials is then taken by torch.sum, which adds in pairs: the fused log_softmax adds tens of
    thousands of small terms to a large one in a row, an error of 1e-5 in float32.
    """
    logits = (hidden @ weight.T).to(wide)
    if scale != 1.0:
        logits.mul_(scale)
    return logits.sub_(logits.amax(-1, keepdim=True))


def _probabilities(hidden: Tensor, weight: Tensor, scale: float, wide: torch.dtype) -> Tensor:
    p = _shifted_logits(hidden, weight, scale, wide).exp_()
    return p.div_(p.sum(-1, keepdim=True))


def _token_bounds(state_of: Tensor, states: int, rows: int) -> list[tuple[int, int]]:
    """The tokens [first, last) of each chunk of `rows` states."""
    edges = torch.arange(0, states + rows, rows, device=state_of.device)[: -(-states // rows) + 1]
    places = torch.searchsorted(state_of, edges).tolist()
    return list(pairwise(places))


def token_logprobs(hidden: Tensor, weight: Tensor, state_of: Tensor, targets: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability of each target token, and the entropy of each state's distribution.

    Args:
        hidden: [states, hidden size] what the output layer sees, one row per state.
        weight: [vocabulary, hidden size] the output layer.
        state_of: int64 [tokens], ascending: the state that each token follows. Several tokens may follow one state.
        targets: int64 [tokens] their ids.
        scale: logits are multiplied by it: 1 / temperature.

    Returns:
        float32 [tokens] and float32 [states]; both carry gradients to `hidden` and `weight`.
    """
    logprobs, entropies = _TokenLogprobs.apply(hidden, weight, state_of, targets, scale)
    return logprobs, entropies
