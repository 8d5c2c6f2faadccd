"""exact: the response is the label, white space around it aside."""

from __future__ import annotations

from miles.types import Sample


def score(sample: Sample) -> float | None:
    """1.0 when the stripped response equals the stripped label as text, else 0.0. No or an empty label: unscorable."""
    label = "" if sample.label is None else str(sample.label).strip()
    return float(sample.response.strip() == label) if label else None
