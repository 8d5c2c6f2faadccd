"""Chooses a forward pass for a model and proves it, before anything is served."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedModel

from miles.engines.embedded import attention
from miles.engines.embedded.attention import Batch, Chunk
from miles.engines.embedded.cache import SlotCache
from miles.engines.embedded.llama import LlamaForward
from miles.engines.embedded.model import Forward, TransformersForward, vocabulary_of

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Largest difference of a log-prob that rounding explains."""


def fit_forward(model: PreTrainedModel, cache: SlotCache) -> Forward:
    """The fastest forward pass that gives this model's own log-probs, through slots, in chunks and token by token.

    Raises:
        ValueError: none does: the model's attention is not plain full attention, whatever its config says.
    """
    makers: list[Callable[[PreTrainedModel], Forward]] = [LlamaForward] if LlamaForward.knows(model) else []
    for make in [*makers, TransformersForward]:
        forward = make(model)
        gap = _gap(model, forward, cache)
        if gap <= TOLERANCE[model.dtype]:
            logger.info("%s: %s is off by at most %.2g", type(model).__name__, type(forward).__name__, gap)
            return forward
        logger.warning("%s: %s is off by %.2g", type(model).__name__, type(forward).__name__, gap)
    raise ValueError(
        f"{type(model).__name__}: the embedded engine cannot serve this architecture: its log-probs come out wrong by {gap:.2g}"
    )


@torch.inference_mode()
def _gap(model: PreTrainedModel, forward: Forward, cache: SlotCache) -> float:
    """Largest difference of a likely token's log-prob from transformers' own pass, for one short prompt in the last slot."""
    length, slot = min(12, cache.max_context), cache.num_slots - 1
    ids = torch.arange(length, device=model.device) * 7 % vocabulary_of(model)
    model.set_attn_implementation("sdpa")
    try:
        expected = model(input_ids=ids[None], use_cache=False).logits[0].float().log_softmax(-1)
    finally:
        model.set_attn_implementation(attention.NAME)
    if not bool(expected.isfinite().all()):
        return 0.0  # broken weights are found when a request meets them
    bounds = sorted({0, length // 2, length - 1, length})
    found: list[Tensor] = []
    for start, end in pairwise(bounds):
        chunk = [Chunk(slot, start, end)]
        batch = Batch.plan(cache, chunk, []) if end - start == 1 else Batch.plan(cache, [], chunk)
        found.append(forward(ids[start:end], batch, torch.arange(end - start, device=model.device)))
    likely = expected.topk(min(8, expected.shape[-1]), -1).indices
    gap = (torch.cat(found).float().log_softmax(-1) - expected).gather(-1, likely).abs().max()
    return float(gap) if bool(gap.isfinite()) else float("inf")
