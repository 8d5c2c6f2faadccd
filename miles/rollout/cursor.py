"""The data cursor of a checkpoint: where the last trained batch ended, however far generation is ahead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def merged(state: dict[str, Any], untrained: Iterable[int]) -> dict[str, Any]:
    """The data source's state as if the `untrained` draws had not been taken.

    They are taken again first, in order. A run of them that ends at the cursor moves the cursor back instead, so plain
    mode's checkpoint reads as one number.
    """
    attempts = {int(index): int(attempt) for index, attempt in state["returned"]}
    attempts |= dict.fromkeys(untrained, 0)
    following = int(state["next_group_index"])
    while attempts.get(following - 1) == 0:
        following -= 1
        del attempts[following]
    return state | {"next_group_index": following, "returned": [list(draw) for draw in sorted(attempts.items())]}
