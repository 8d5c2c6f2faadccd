"""think_format: the response thinks once, between <think> and </think>, and answers after it. For mixes with another reward."""

from __future__ import annotations

from miles.types import Sample


def score(sample: Sample) -> dict[str, float]:
    """1.0 for "<think>...</think> answer" with each tag once and something on both sides, else 0.0.

    The opening tag may be missing, as chat templates write it themselves. `marked` says whether there is a closing tag:
    a model that does not think in tags gets 0 from this reward, by intent.
    """
    text = sample.response.strip().removeprefix("<think>")
    thought, mark, answer = text.partition("</think>")
    once = "<think>" not in text and "</think>" not in answer
    return {"reward": float(bool(mark) and once and bool(thought.strip()) and bool(answer.strip())), "marked": float(bool(mark))}
