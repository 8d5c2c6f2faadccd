"""Token ids as text that a person can read, cut where the loss mask changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

BROKEN = "�"


class Piece(NamedTuple):
    """One token, or the few that only together are a character."""

    text: str
    trained: bool
    num_tokens: int


def pieces(tokenizer: Any, ids: Sequence[int], mask: Sequence[int]) -> list[Piece]:
    """The tokens in order. Pieces never join tokens of different mask."""
    found: list[Piece] = []
    start = 0
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(list(ids[start:end]), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        whole = end == len(ids) or mask[end] != mask[start] or BROKEN not in text or end - start == 4
        if whole:
            found.append(Piece(text, bool(mask[start]), end - start))
            start = end
    return found
