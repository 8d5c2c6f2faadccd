"""Attention of a packed batch over the slots, plugged into transformers as one more attention implementation.

The model sees one row of tokens [1, tokens]: one token of every decoding sequence, then the chunks being prefilled, without
padding. Only here do they part: new keys and values go to their slots, and each token attends to its own slot's context.
So the model needs no cache object of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from miles.engines.embedded.cache import SlotCache

NAME = "miles_slots"
CONTEXT_STEP = 32
"""Decode reads the context rounded up to a multiple of this: few shapes, and masks aligned as CUDA kernels want them."""


class Chunk(NamedTuple):
    """Tokens [start, end) of the sequence in `slot`, to be computed in this pass."""

    slot: int
    start: int
    end: int


class Attending(Protocol):
    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
        """query, key, value [tokens, heads, dim] of one layer -> [tokens, query heads, dim]."""
        ...


@dataclass(slots=True)
class Batch:
    """One packed forward pass: decoding tokens first, in the order of their slots, then the prefill chunks."""

    cache: SlotCache
    slots: torch.Tensor  # [tokens]
    positions: torch.Tensor  # [tokens]
    num_decode: int
    num_slots: int  # slots [0, num_slots) take part in the decode product
    context: int
    mask: torch.Tensor | None  # [num_slots, 1, 1, context] 0 or -inf
    dense: bool  # decode rows are exactly slots 0 .. num_decode - 1
    prefills: list[Chunk]

    @classmethod
    def plan(cls, cache: SlotCache, decodes: list[Chunk], prefills: list[Chunk]) -> Batch:
        device, dtype = cache.keys.device, cache.keys.dtype
        chunks = decodes + prefills
        slots = [chunk.slot for chunk in chunks for _ in range(chunk.start, chunk.end)]
        positions = [position for chunk in chunks for position in range(chunk.start, chunk.end)]
        num_slots = decodes[-1].slot + 1 if decodes else 0
        mask, context = None, 0
        if decodes:
            longest = max(chunk.end for chunk in decodes)
            context = min(cache.max_context, -(-longest // CONTEXT_STEP) * CONTEXT_STEP)
            last = [0] * num_slots
            for chunk in decodes:
                last[chunk.slot] = chunk.start
            hidden = torch.arange(context) > torch.tensor(last)[:, None]
            mask = torch.zeros(num_slots, context, dtype=dtype).masked_fill_(hidden, float("-inf"))[:, None, None].to(device)
        return cls(
            cache=cache,
            slots=torch.tensor(slots, device=device),
            positions=torch.tensor(positions, device=device),
            num_decode=len(decodes),
            num_slots=num_slots,
            context=context,
            mask=mask,
            dense=num_slots == len(decodes),
            prefills=prefills,
        )

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
        self.cache.write(layer, self.slots, self.positions, key, value)
        parts = [self._decode(layer, query[: self.num_decode], scale)] if self.num_decode else []
        begin = self.num_decode
        for chunk in self.prefills:
            tokens = slice(begin, begin + chunk.end - chunk.start)
            parts.append(self._prefill(layer, chunk, (query[tokens], key[tokens], value[tokens]), scale))
            begin = tokens.stop
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, layer: int, query: torch.Tensor, scale: float | None) -> torch.Tensor:
        """One token per decoding slot; heads of one group become the query rows of their shared key head."""
        num_rows, num_heads, dim = query.shape
        keys = self.cache.keys[layer, : self.num_slots, :, : self.context]
        values = self.cache.values[layer, : self.num_slots, :, : self.context]
        rows = self.slots[:num_rows]
        if not self.dense:
            query = query.new_zeros(self.num_slots, num_heads, dim).index_copy_(0, rows, query)
        num_kv_heads = keys.shape[1]
        grouped = query.reshape(self.num_slots, num_kv_heads, num_heads // num_kv_heads, dim)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self.mask, scale=scale)
        out = out.reshape(self.num_slots, num_heads, -1)
        return out if self.dense else out.index_select(0, rows)

    def _prefill(self, layer: int, chunk: Chunk, own: tuple[torch.Tensor, ...], scale: float | None) -> torch.Tensor:
        """One chunk: causal among its own tokens, and after what its slot held before."""
        query, key, value = (part.transpose(0, 1) for part in own)  # [heads, chunk, dim]
        mask = None
        if chunk.start:
            key, value = self.cache.keys[layer, chunk.slot, :, : chunk.end], self.cache.values[layer, chunk.slot, :, : chunk.end]
            rows = torch.arange(chunk.start, chunk.end, device=query.device)
            mask = torch.arange(chunk.end, device=query.device) <= rows[:, None]
        out = F.scaled_dot_product_attention(
            query[None], key[None], value[None], attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)


_current: ContextVar[Attending] = ContextVar("attending")


@contextmanager
def attending(batch: Attending) -> Iterator[None]:
    """Forward passes inside attend as `batch` says. Per thread, so that engines in one process do not meet."""
    token = _current.set(batch)
    try:
        yield
    finally:
        _current.reset(token)


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls. query, key, value [1, heads, tokens, dim]; returns [1, tokens, heads, dim]."""
    for name in ("softcap", "s_aux", "position_bias", "sliding_window"):
        if options.get(name) is not None:
            raise ValueError(f"the embedded engine does plain full attention; this model asks for {name}")
    layer = module.layer_idx
    assert isinstance(layer, int)
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
    return _current.get().attend(layer, query, key, value, scaling)[None], None


AttentionInterface.register(NAME, slot_attention)
