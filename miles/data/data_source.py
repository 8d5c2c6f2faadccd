"""Which prompt comes next: a draw is determined by its number alone, so the cursor is one number and a short list."""

from __future__ import annotations

import heapq
import logging
from collections import OrderedDict
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np

from miles.data.dataset import PromptRow
from miles.types import PromptGroup, Sample

logger = logging.getLogger(__name__)

ORDERS_KEPT = 3


def make_group(
    row: PromptRow, prompt_index: int, group_index: int, epoch: int, n: int, *, attempt: int = 0, data_set: str = ""
) -> PromptGroup:
    """`n` empty siblings of one prompt. Training and evaluation make their groups here."""
    samples = [
        Sample(
            sample_index=group_index * n + place,
            group_index=group_index,
            prompt=row.prompt if isinstance(row.prompt, str) else deepcopy(row.prompt),
            prompt_ids=list(row.prompt_ids),
            label=row.label,
            metadata=deepcopy(row.metadata),
            tools=row.tools,
        )
        for place in range(n)
    ]
    return PromptGroup(group_index, prompt_index, epoch, samples, attempt, data_set)


class DatasetSource:
    """A `DataSource` over rows in memory: a new order each epoch, given-back draws first, endless unless `num_epoch` ends it.

    Draw g is row order(g // rows)[g % rows], whatever was taken, given back, saved or loaded before.
    """

    def __init__(
        self, rows: Sequence[PromptRow], n_samples_per_prompt: int, *, seed: int, shuffle: bool = True, num_epoch: int | None = None
    ):
        if not rows:
            raise ValueError("a data source needs at least one prompt")
        self._rows = rows
        self._n = n_samples_per_prompt
        self._seed = seed
        self._shuffle = shuffle
        self._end = None if num_epoch is None else num_epoch * len(rows)
        self._next = 0
        self._returned: list[tuple[int, int]] = []  # heap of (group_index, attempt)
        self._orders: OrderedDict[int, np.ndarray] = OrderedDict()

    def rows(self) -> int:
        return len(self._rows)

    def take(self) -> PromptGroup | None:
        """The oldest given-back draw, else the next one; None once `num_epoch` passes are taken and nothing was given back."""
        if self._returned:
            return self.draw(*heapq.heappop(self._returned))
        if self._end is not None and self._next >= self._end:
            return None
        self._next += 1
        return self.draw(self._next - 1)

    def give_back(self, group: PromptGroup) -> None:
        """Have a taken draw started again: empty siblings, one attempt later."""
        if not 0 <= group.group_index < self._next:
            raise ValueError(f"group {group.group_index} was never taken; {self._next} were")
        if any(index == group.group_index for index, _ in self._returned):
            raise ValueError(f"group {group.group_index} was given back twice")
        heapq.heappush(self._returned, (group.group_index, group.attempt + 1))

    def draw(self, group_index: int, attempt: int = 0) -> PromptGroup:
        """The group of that number, empty; moves nothing."""
        epoch, place = divmod(group_index, len(self._rows))
        prompt_index = int(self._order(epoch)[place]) if self._shuffle else place
        return make_group(self._rows[prompt_index], prompt_index, group_index, epoch, self._n, attempt=attempt)

    def state(self) -> dict[str, Any]:
        """JSON values. An executor adds the draws that a checkpoint must start again to "returned", as [group_index, attempt]."""
        return {
            "next_group_index": self._next,
            "returned": [list(draw) for draw in sorted(self._returned)],
            "rows": len(self._rows),
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. Other data, seed or shuffle than then is allowed, with a warning that the order differs."""
        returned = [(int(index), int(attempt)) for index, attempt in state["returned"]]
        following = int(state["next_group_index"])
        if len({index for index, _ in returned}) != len(returned) or any(not 0 <= index < following for index, _ in returned):
            raise ValueError(f"the data source's state is inconsistent: next draw {following}, given back {returned}")
        now = {"rows": len(self._rows), "seed": self._seed, "shuffle": self._shuffle}
        if changed := [f"{key} {state[key]} -> {value}" for key, value in now.items() if key in state and state[key] != value]:
            logger.warning("the data order differs from the checkpoint's (%s): prompts may repeat or be left out", ", ".join(changed))
        self._next = following
        self._returned = returned
        heapq.heapify(self._returned)

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            self._orders[epoch] = epoch_order(len(self._rows), self._seed, epoch)
            if len(self._orders) > ORDERS_KEPT:
                self._orders.popitem(last=False)
        return self._orders[epoch]


def epoch_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation of one epoch, int64 [rows]: rows sorted by a hash of (seed, epoch, row).

    Our own hash (splitmix64), because numpy's generators may change their streams between versions and a resumed run
    must find the order that it left.
    """
    start = _mix(_mix(np.asarray([seed % 2**64], np.uint64)) ^ np.asarray([epoch], np.uint64))
    keys = _mix(start ^ _mix(np.arange(rows, dtype=np.uint64)))
    return np.argsort(keys, kind="stable")


def _mix(values: np.ndarray) -> np.ndarray:
    """splitmix64 (Steele, Lea, Flood 2014); uint64 arithmetic wraps."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
