"""A run's metrics.jsonl as lines."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ODD = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


def read(folder: str | Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, with NaN and infinities as floats again; a torn last line is left out."""
    path = Path(folder) / "metrics.jsonl"
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        lines.append({name: ODD.get(value, value) if isinstance(value, str) else value for name, value in line.items()})
    return lines


def has_eval(lines: Iterable[dict[str, Any]], rollout_id: int) -> bool:
    """Whether the evaluation after this rollout is there; that before any training, which is at rollout 0 too, has step 0."""
    return any(line["rollout_id"] == rollout_id and line["step"] and any(name.startswith("eval/") for name in line) for line in lines)
