"""A reward tried on answers whose worth is known: every row's gold answer, another row's, and none."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from miles.config.reward import RewardSection, parts_of
from miles.rewards import math_answer
from miles.rewards.reward import RewardScorer
from miles.types import Sample

Kind = Literal["gold", "wrong", "empty"]
KINDS: tuple[Kind, ...] = ("gold", "wrong", "empty")
THOUGHT = "<think>It is known.</think>\n"
AT_ONCE = 64
ENOUGH = 1e-6

FORMS: dict[str, Callable[[Any], str]] = {
    "math": lambda label: f"\\boxed{{{math_answer.label_text(label).strip()}}}",
    "dapo": lambda label: f"Answer: {math_answer.label_text(label).strip()}",
    "gsm8k": lambda label: str(label) if "####" in str(label) else f"#### {label}",
    "multiple_choice": lambda label: f"Answer: {label}",
    "f1": lambda label: str(label[0] if isinstance(label, list) and label else label),
}
"""How a right answer is written, by reward; elsewhere it is the label as it stands."""


@dataclass(frozen=True, slots=True)
class TrialRow:
    """What a reward is tried with. `gold` is a right response where the label alone is none."""

    where: str  # file:line
    prompt: Any
    label: Any
    metadata: dict[str, Any]
    data_set: str = ""
    gold: str | None = None


@dataclass(frozen=True, slots=True)
class Tried:
    row: TrialRow
    kind: Kind
    response: str
    reward: float | None
    error: str | None
    best: float  # the most that the reward gives

    @property
    def problem(self) -> str:
        """Why this outcome is none that a right reward gives; "" when it is."""
        if self.error is not None:
            return self.error
        if self.kind == "gold" and self.reward is None:
            return "cannot be scored"
        if self.kind == "gold" and self.reward is not None and self.reward < self.best - ENOUGH:
            return f"gets {self.reward:g}, not {self.best:g}"
        if self.kind != "gold" and self.reward is not None and self.reward > ENOUGH:
            return f"gets {self.reward:g}"
        return ""


async def try_reward(
    args: RewardSection, rows: Sequence[TrialRow], told: Callable[[int, int], None] = lambda done, of: None
) -> list[Tried]:
    """Score what `answers` makes of the rows. A reward that fails is an outcome here, whatever reward_failure says.

    Args:
        told: called with how many answers are scored, of how many, after each.

    Raises:
        ValueError: the reward cannot be loaded.
    """
    lenient = args.model_copy(update={"reward_failure": "exclude"})
    scorer = RewardScorer(lenient)
    places = asyncio.Semaphore(AT_ONCE)
    tried, done = list(answers(args, rows)), itertools.count(1)

    async def one(row: TrialRow, kind: Kind, response: str) -> Tried:
        sample = Sample(
            0, 0, row.prompt, [], label=row.label, metadata=row.metadata, data_set=row.data_set, response=response, response_ids=[0]
        )
        async with places:
            await scorer.score(sample)
        told(next(done), len(tried))
        best = sum(max(weight, 0.0) for weight in parts_of(_reward_of(args, row)).values())
        return Tried(row, kind, response, sample.reward, sample.error, best)

    try:
        return await asyncio.gather(*(one(*each) for each in tried))
    finally:
        await scorer.dispose()


def answers(args: RewardSection, rows: Sequence[TrialRow]) -> Iterator[tuple[TrialRow, Kind, str]]:
    """Row by row its gold answer, where there is one, the gold answer of the next row with one and another label, and the empty one."""
    labels = [_same_for_equals(row.label) for row in rows]
    for place, row in enumerate(rows):
        gold = gold_answer(_reward_of(args, row), row)
        if gold is not None:
            yield row, "gold", gold
        others = (other % len(rows) for other in range(place + 1, place + len(rows)))
        others_gold = (gold_answer(_reward_of(args, row), rows[other]) for other in others if labels[other] != labels[place])
        wrong = next((answer for answer in others_gold if answer is not None), None)
        if wrong is not None:
            yield row, "wrong", wrong.rpartition("</think>")[2].lstrip("\n")  # or it would have earned what a mix gives for the form
        yield row, "empty", ""


def _same_for_equals(label: Any) -> float | str:
    """ "4" and 4.0 are the same answer to most rewards, so neither is a wrong one for the other."""
    try:
        return float(label)
    except (TypeError, ValueError):
        return json.dumps(label, sort_keys=True, default=str)


def gold_answer(reward: str, row: TrialRow) -> str | None:
    """A response that ought to get everything, None where the row has none."""
    parts = parts_of(reward)
    if row.gold is not None:
        return row.gold if "think_format" not in parts or "</think>" in row.gold else THOUGHT + row.gold
    if row.label is None or isinstance(row.label, dict):
        return None
    form = next((FORMS[part] for part in parts if part in FORMS), str)
    return (THOUGHT if "think_format" in parts else "") + form(row.label)


def _reward_of(args: RewardSection, row: TrialRow) -> str:
    return args.reward_by_set.get(row.data_set, args.reward)
