"""dapo: the answer on the last "Answer: ..." line equals the label, as mathematics; +1 or -1."""

from __future__ import annotations

import re

from miles.rewards.math_answer import grade, last_box
from miles.types import Sample

STATED = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)


def score(sample: Sample) -> dict[str, float] | None:
    """reward +1.0 when right, -1.0 when wrong or without such a line (eq. 7 of DAPO, arXiv 2503.14476); None for a label that
    cannot be read. Details: `right` 1 or 0, and `marked`, whether there is such a line at all."""
    found = STATED.findall(sample.response.rpartition("</think>")[2])
    answer = found[-1].strip().strip("*").strip() if found else ""
    verdict = grade(answer if last_box(answer) is not None else f"\\boxed{{{answer}}}", sample.label)
    return None if verdict is None else {"reward": 2.0 * verdict - 1.0, "right": verdict, "marked": float(bool(found))}
