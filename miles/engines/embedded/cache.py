"""Keys and values of all slots: two tensors, allocated once."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one token keeps in the cache; found by a probe of the model, not read from its config."""

    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device


class SlotCache:
    """Slot s, layer l holds the keys of its sequence at `keys[l, s, :, :cached]`.

    Memory of slots that were never used is not touched: zeros are mapped lazily on CPU.
    """

    def __init__(self, shape: CacheShape, num_slots: int, max_context: int) -> None:
        self.shape = shape
        self.num_slots = num_slots
        self.max_context = max_context
        self.allocate()

    def allocate(self) -> None:
        """Get fresh, zeroed memory."""
        shape = self.shape
        lead = (shape.num_layers, self.num_slots, shape.num_kv_heads, self.max_context)
        self.keys = torch.zeros(*lead, shape.key_dim, dtype=shape.dtype, device=shape.device)  # [layers, slots, kv heads, context, dim]
        self.values = torch.zeros(*lead, shape.value_dim, dtype=shape.dtype, device=shape.device)

    def release(self) -> None:
        """Give the memory back; `allocate` before the next use."""
        self.keys = self.values = torch.empty(0)

    def write(self, layer: int, slots: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store one layer's new tokens. slots, positions [tokens]; keys, values [tokens, kv heads, dim]."""
        self.keys[layer][slots, :, positions] = keys
        self.values[layer][slots, :, positions] = values

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Copy positions [start, end) of one slot into another, all layers."""
        for part in (self.keys, self.values):
            part[:, target, :, start:end] = part[:, source, :, start:end]
