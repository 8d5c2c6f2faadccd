"""multiple_choice: the letter that the response names as its answer is the label."""

from __future__ import annotations

import re

from miles.rewards.math_answer import last_box
from miles.types import Sample

LETTER = r"\(?\**\\?(?:text(?:bf)?\{)?\(?([A-Z])\)?\}?\**\)?(?![A-Za-z'’])"
STATED = re.compile(rf"(?:answer|choice|option)\**(?:\s+is|\s*[:=])\**\s*:?\s*(?:option\s+|choice\s+)?\**\$?{LETTER}", re.IGNORECASE)
ALONE = re.compile(rf"\s*\$?{LETTER}\$?[.:]?\s*")


def score(sample: Sample) -> float | None:
    """1.0 when the stated choice is the label, else 0.0; None for a label that is no single letter.

    A choice counts only where it is stated: in the last box, after "answer:", "answer is" and the like (the last such
    statement), or as the whole response. A capital letter somewhere in a sentence is never taken for one.
    """
    label = choice(str(sample.label or ""))
    return None if label is None else float(choice(sample.response) == label)


def choice(text: str) -> str | None:
    """The stated letter, in upper case."""
    text = text.rpartition("</think>")[2]
    if (boxed := last_box(text)) is not None:
        found = ALONE.fullmatch(boxed)
    else:
        found = ALONE.fullmatch(text) or ALONE.fullmatch(text.strip().split("\n")[-1])
        stated = [match for match in STATED.finditer(text) if match[1].isupper()]
        found = found or (stated[-1] if stated else None)
    return found[1] if found else None
