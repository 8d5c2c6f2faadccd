"""A few samples of each rollout as readable lines: what was asked, what came, and what it was worth."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from miles.types import PromptGroup, Sample


def write_samples(path: Path, groups: Sequence[PromptGroup], count: int, tokenizer: Any) -> None:
    """Write `count` samples, spread evenly over the batch, as JSON lines."""
    samples = [sample for group in groups for sample in group.samples]
    count = min(count, len(samples))
    if count == 0:
        return
    chosen = [samples[place * len(samples) // count] for place in range(count)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(_line(sample, tokenizer), ensure_ascii=False, default=str) + "\n" for sample in chosen), "utf-8")


def _line(sample: Sample, tokenizer: Any) -> dict[str, Any]:
    return {
        "group_index": sample.group_index,
        "sample_index": sample.sample_index,
        **({"data_set": sample.data_set} if sample.data_set else {}),
        "prompt": tokenizer.decode(sample.prompt_ids, skip_special_tokens=False),
        "response": sample.response,
        "reward": sample.reward,
        "reward_details": sample.reward_details,
        "label": sample.label,
        "status": sample.status.value,
        "tokens": len(sample.response_ids),
        "versions": [list(span) for span in sample.version_spans],
        "error": sample.error,
    }
