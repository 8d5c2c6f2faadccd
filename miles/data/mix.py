"""The training prompts of a run: one file, or several that are drawn from by weight."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, overload

import numpy as np

from miles.config.data import DataSection
from miles.config.run_config import RunConfig
from miles.data.data_source import DatasetSource
from miles.data.dataset import PromptRow, load_prompts
from miles.data.order import Order

PASS_RATE = "pass_rate"
"""The curriculum that goes by what was measured."""


class Joined(Sequence[PromptRow]):
    """Several data sets as one; row numbers run through them."""

    def __init__(self, parts: Sequence[Sequence[PromptRow]]):
        self._parts = parts
        self._starts = [0, *accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, index: int) -> PromptRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[PromptRow]: ...
    def __getitem__(self, index: int | slice) -> PromptRow | list[PromptRow]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        part = bisect_right(self._starts, index) - 1
        return self._parts[part][index - self._starts[part]]


def difficulty_field(args: DataSection) -> str | None:
    """The field of rows that tells how hard they are, where a curriculum goes by one."""
    return args.curriculum if args.curriculum != PASS_RATE else None


def load_source(args: RunConfig, tokenizer: Any) -> DatasetSource:
    """Read all training sets; the source knows of each row which set it is from, where there are several.

    Raises:
        ValueError: as load_prompts; a weight so small that its set would never be drawn.
    """
    field = difficulty_field(args)
    how: dict[str, Any] = {"lazy": args.lazy_data, "room": args.engine_max_context}
    sets = {name: load_prompts(path, tokenizer, args, field, **how) for name, path in args.prompt_data.items()}
    sizes = tuple(len(each.rows) for each in sets.values())
    weights = tuple(args.prompt_weights[name] for name in sets) if args.prompt_weights else None
    order = Order(sizes, args.seed, args.shuffle, weights)
    if weights is not None and 0 in (quotas := order.quotas()):
        never = list(sets)[quotas.index(0)]
        raise ValueError(f"--prompt-weights: {never} would get none of the {sum(sizes)} draws of an epoch")
    difficulty = None
    if field is not None:
        difficulty = np.concatenate([np.asarray(each.difficulty, np.float64) for each in sets.values()])
    rows = [each.rows for each in sets.values()]
    source = DatasetSource(
        rows[0] if len(rows) == 1 else Joined(rows),
        args.n_samples_per_prompt,
        seed=args.seed,
        shuffle=args.shuffle,
        num_epoch=args.num_epoch,
        order=order,
        names=tuple(sets) if len(sets) > 1 or args.reward_by_set else ("",),
        difficulty=difficulty,
        measure=args.curriculum == PASS_RATE,
    )
    source.num_left_out = sum(each.num_skipped + each.num_too_long for each in sets.values())
    return source
