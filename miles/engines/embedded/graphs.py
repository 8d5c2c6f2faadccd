"""Decode steps as CUDA graphs: one launch instead of hundreds, which is most of a small model's step on a GPU.

A graph is captured when a size of batch and context first occurs. It reads and writes the same memory at every replay: the model's
parameters, which publishes change in place, the slots, and the inputs here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from miles.engines.embedded.attention import Batch
from miles.engines.embedded.cache import SlotCache
from miles.engines.embedded.model import Forward

SHORTEST_CONTEXT = 128


class DecodeGraphs:
    """One token for each of slots 0 .. rows - 1, as many as there are sequences; slots behind them are free and may be scribbled on."""

    def __init__(self, forward: Forward, cache: SlotCache) -> None:
        self._forward, self._cache = forward, cache
        device = cache.shape.device
        self._token_ids = torch.zeros(cache.num_slots, dtype=torch.long, device=device)
        self._positions = torch.zeros(cache.num_slots, dtype=torch.long, device=device)
        self._slots = torch.arange(cache.num_slots, device=device)
        self._logits: Tensor | None = None  # [slots, vocabulary] of all graphs
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, token_ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        """token_ids, positions [rows], by slot. Returns logits [rows, vocabulary], valid until the next call."""
        rows = len(token_ids)
        size = min(batch_size(rows), self._cache.num_slots)
        context = min(context_size(max(positions) + 1), self._cache.max_context)
        padding = [0] * (size - rows)
        self._token_ids[:size].copy_(torch.tensor([*token_ids, *padding]))
        self._positions[:size].copy_(torch.tensor([*positions, *padding]))
        if (size, context) not in self._graphs:
            self._graphs[size, context] = self._capture(size, context)
        self._graphs[size, context].replay()
        assert self._logits is not None
        return self._logits[:rows]

    def forget(self) -> None:
        """Parameters or slots have moved: capture anew."""
        self._graphs.clear()
        self._logits = None
        self._pool = torch.cuda.graph_pool_handle()

    def _capture(self, size: int, context: int) -> torch.cuda.CUDAGraph:
        first = torch.cuda.Stream()
        first.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(first):  # libraries make their workspaces; what it writes, the replay writes again
            logits = self._run(size, context)
            if self._logits is None:
                self._logits = logits.new_empty(self._cache.num_slots, logits.shape[-1])
        torch.cuda.current_stream().wait_stream(first)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):  # others may use the GPU meanwhile
            self._logits[:size].copy_(self._run(size, context))
        return graph

    def _run(self, size: int, context: int) -> Tensor:
        positions, slots = self._positions[:size], self._slots[:size]
        hidden = torch.arange(context, device=positions.device) > positions[:, None]
        mask = torch.zeros(size, context, dtype=self._cache.shape.dtype, device=positions.device).masked_fill_(hidden, float("-inf"))
        batch = Batch(self._cache, slots, positions, size, size, context, mask[:, None, None], dense=True, prefills=[])
        return self._forward(self._token_ids[:size], batch, slots)


def batch_size(rows: int) -> int:
    """1, 2, 4, 8, 16, 24, 32, 48, 64, 96, ...: at most half as many rows again above 16, and few sizes."""
    power = 1 << (rows - 1).bit_length()
    return power * 3 // 4 if power >= 32 and rows <= power * 3 // 4 else power


def context_size(tokens: int) -> int:
    return max(SHORTEST_CONTEXT, 1 << (tokens - 1).bit_length())
