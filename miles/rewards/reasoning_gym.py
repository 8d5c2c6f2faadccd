"""reasoning_gym: scored by the task's own scorer of the reasoning-gym package (an optional dependency)."""

from __future__ import annotations

import re
from typing import Any

from miles.plugins import load
from miles.rewards.math_answer import last_box
from miles.types import Sample

TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
STATED = re.compile(r"answer\s*(?:is|:)\s*:?\s*(.+)", re.IGNORECASE)


class ReasoningGym:
    """Scorers by task, made when first met.

    Raises:
        ValueError: the package is not installed.
    """

    def __init__(self, args: object):
        self._find = _scorers()

    def __call__(self, sample: Sample) -> float | None:
        """The task's score in 0..1 of the answer in the response; None for a row that is no reasoning-gym entry.

        The row's metadata is the entry's own (with "source_dataset"); the label is the entry's answer.
        """
        task = sample.metadata.get("source_dataset")
        if not task:
            return None
        entry = {"question": sample.prompt, "answer": sample.label, "metadata": sample.metadata}
        return float(self._find(task)(answer_in(sample.response), entry))


def answer_in(response: str) -> str:
    """What the strict scorers get: the last box, <answer> tag, or "answer is ..." of a response; else all of it."""
    text = response.rpartition("</think>")[2]
    if (boxed := last_box(text)) is not None:
        return boxed.strip()
    if tagged := TAGGED.findall(text):
        return str(tagged[-1]).strip()
    if stated := STATED.findall(text):
        return str(stated[-1]).strip().rstrip(".")
    return text.strip()


def _scorers() -> Any:
    try:
        return load("reasoning_gym.get_score_answer_fn")
    except ValueError as error:
        raise ValueError(f"--reward reasoning_gym needs the package reasoning-gym: pip install 'miles[gym]' ({error})") from None
