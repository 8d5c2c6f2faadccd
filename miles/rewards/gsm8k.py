"""gsm8k: the number after "####", else the last number of the response, is the one that the label ends with."""

from __future__ import annotations

from decimal import Decimal

from miles.rewards.last_number import last_number
from miles.types import Sample

MARK = "####"


def score(sample: Sample) -> float | None:
    """1.0 when the numbers are equal, else 0.0; None for a label without a number.

    The label may be a whole worked solution that ends in "#### 42", as in GSM8K (Cobbe et al. 2021, arXiv 2110.14168), or the
    number alone. A response that has a "####" is taken at its word: without a number behind the last one it is wrong.
    """
    label = answer_in(str(sample.label)) if sample.label is not None else None
    return None if label is None else float(answer_in(sample.response.rpartition("</think>")[2]) == label)


def answer_in(text: str) -> Decimal | None:
    _, mark, after = text.rpartition(MARK)
    return last_number(after.strip().split("\n")[0]) if mark else last_number(text)
