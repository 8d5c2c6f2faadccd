"""last_number: the last number in the response is the label. A lenient verifier for small models."""

from __future__ import annotations

import re
from decimal import Decimal

from miles.types import Sample

NUMBER = re.compile(r"(?:(?<![\w.)\]])[-−])?(?:\d{1,3}(?:,\d{3})+(?![\d,]*\d)|\d+)(?:\.\d+)?|(?:(?<![\w.)\]])[-−])?(?<![\d.])\.\d+")


def score(sample: Sample) -> float | None:
    """1.0 when the last integer or decimal of the response equals the label's, else 0.0. 1,000 is 1000, 3.50 is 3.5, and the
    minus of "7-3" is no sign. A label without a number: unscorable."""
    label = last_number(str(sample.label))
    if sample.label is None or label is None:
        return None
    return float(last_number(sample.response) == label)


def last_number(text: str) -> Decimal | None:
    found = NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "").replace("−", "-")) if found else None
