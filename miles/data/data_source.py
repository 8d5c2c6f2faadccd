"""Which prompt comes next: a draw is determined by its number alone, so the cursor is one number and a short list."""

from __future__ import annotations

import heapq
import logging
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from copy import deepcopy
from functools import cached_property
from typing import Any

import numpy as np

from miles.data.dataset import PromptRow
from miles.data.order import Order
from miles.types import PromptGroup, Sample

logger = logging.getLogger(__name__)

ORDERS_KEPT = 3
PROMPTS_SUMMED = 64
MEASURED_ROWS_KEPT = 2**16
"""Of orders by measured pass rate, which later measurements would change, so many rows are kept beyond ORDERS_KEPT."""


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
            data_set=data_set,
        )
        for place in range(n)
    ]
    return PromptGroup(group_index, prompt_index, epoch, samples, attempt, data_set)


class DatasetSource:
    """A `DataSource`: a new order each epoch, given-back draws first, endless unless `num_epoch` ends it.

    Draw g is row order(g // rows)[g % rows], whatever was taken, given back, saved or loaded before.

    Args:
        order: mixes of several sets; default: all rows as one set.
        names: of the sets in `order`, which groups and samples carry.
        difficulty: float64 [rows], lowest first in every epoch.
        measure: order each epoch but the first by the mean reward of each row's last scored group, highest first; rows that
            were never scored come before them. An epoch's order is fixed at its first draw, and is part of the state.
    """

    def __init__(
        self,
        rows: Sequence[PromptRow],
        n_samples_per_prompt: int,
        *,
        seed: int,
        shuffle: bool = True,
        num_epoch: int | None = None,
        order: Order | None = None,
        names: tuple[str, ...] = ("",),
        difficulty: np.ndarray | None = None,
        measure: bool = False,
    ):
        if not rows:
            raise ValueError("a data source needs at least one prompt")
        self.num_left_out = 0  # rows of the files that are never drawn, as they are bad or too long
        self._rows = rows
        self._n = n_samples_per_prompt
        self._by = order or Order((len(rows),), seed, shuffle)
        self._names = names
        self._ends = np.cumsum(self._by.sizes)  # [sets]
        self._difficulty = difficulty
        self._measure = measure
        self._end = None if num_epoch is None else num_epoch * len(rows)
        self._next = 0
        self._returned: list[tuple[int, int]] = []  # heap of (group_index, attempt)
        self._orders: OrderedDict[int, np.ndarray] = OrderedDict()
        self._rates: dict[int, tuple[int, float]] = {}  # row -> the last scored draw of it, and its mean reward

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
        prompt_index = int(self._order(epoch)[place])
        name = self._names[int(np.searchsorted(self._ends, prompt_index, "right"))]
        return make_group(self._rows[prompt_index], prompt_index, group_index, epoch, self._n, attempt=attempt, data_set=name)

    def note_scored(self, group: PromptGroup) -> None:
        """What a curriculum by pass rate learns from; the latest draw of a row counts."""
        rewards = [sample.reward for sample in group.samples if sample.reward is not None]
        if self._measure and rewards and self._rates.get(group.prompt_index, (-1, 0.0))[0] <= group.group_index:
            self._rates[group.prompt_index] = (group.group_index, sum(rewards) / len(rewards))

    def state(self) -> dict[str, Any]:
        """JSON values. An executor adds the draws that a checkpoint must start again to "returned", as [group_index, attempt]."""
        state: dict[str, Any] = {
            "next_group_index": self._next,
            "returned": [list(draw) for draw in sorted(self._returned)],
            **self.identity(),
        }
        if self._measure:
            state["orders"] = {str(epoch): order.tolist() for epoch, order in self._orders.items()}
            state["pass_rates"] = {str(row): list(rate) for row, rate in sorted(self._rates.items())}
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. Other data, seed or order than then is allowed, with a warning that the order differs."""
        returned = [(int(index), int(attempt)) for index, attempt in state["returned"]]
        following = int(state["next_group_index"])
        if len({index for index, _ in returned}) != len(returned) or any(not 0 <= index < following for index, _ in returned):
            raise ValueError(f"the data source's state is inconsistent: next draw {following}, given back {returned}")
        now = self.identity()
        if changed := [f"{key} {state[key]} -> {value}" for key, value in now.items() if key in state and state[key] != value]:
            logger.warning(
                "the data or their order differ from the checkpoint's (%s): prompts may repeat or be left out", ", ".join(changed)
            )
        self._next = following
        self._returned = returned
        heapq.heapify(self._returned)
        self._orders.clear()
        if self._measure and not changed and "orders" in state:
            self._orders.update((int(epoch), np.asarray(order, np.int64)) for epoch, order in state["orders"].items())
            self._rates = {int(row): (int(draw), float(rate)) for row, (draw, rate) in state["pass_rates"].items()}

    def identity(self) -> dict[str, Any]:
        """What the draws depend on, as JSON values; the prompts themselves as a checksum of some that lie all over the set."""
        by = self._by
        mixed = {"sets": list(by.sizes), "weights": by.weights and list(by.weights)} if len(by.sizes) > 1 else {}
        curriculum = "pass_rate" if self._measure else "none" if self._difficulty is None else "field"
        return {
            "rows": len(self._rows),
            "seed": by.seed,
            "shuffle": by.shuffle,
            "curriculum": curriculum,
            **mixed,
            "prompts": self._prompts,
        }

    @cached_property
    def _prompts(self) -> int:
        places = np.linspace(0, len(self._rows) - 1, min(len(self._rows), PROMPTS_SUMMED)).astype(int).tolist()
        return zlib.crc32(repr([(row.prompt, row.prompt_ids, row.label) for row in map(self._rows.__getitem__, places)]).encode())

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            difficulty = self._difficulty
            if self._measure and epoch:
                difficulty = np.full(len(self._rows), -np.inf)
                difficulty[list(self._rates)] = [-rate for _, rate in self._rates.values()]
            self._orders[epoch] = self._by.epoch(epoch, difficulty)
            if len(self._orders) > ORDERS_KEPT + (MEASURED_ROWS_KEPT // len(self._rows) if self._measure else 0):
                self._orders.popitem(last=False)
        return self._orders[epoch]
