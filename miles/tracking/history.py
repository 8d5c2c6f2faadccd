"""Reading a run back: the lines of its metrics.jsonl as rows and series."""

from collections.abc import Iterable
from typing import Any

USUAL = (
    "rollout/reward",
    "rollout/response_length",
    "train/weight_lag_max",
    "train/loss",
    "train/grad_norm",
    "train/train_rollout_logprob_abs_diff",
    "perf/step_seconds",
    "perf/overlap_efficiency",
)
"""What one looks at first."""


def by_rollout(lines: Iterable[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """One row per rollout, in order; of several values of a metric (optimizer steps) the last."""
    rows: dict[int, dict[str, Any]] = {}
    for line in lines:
        rows.setdefault(line["rollout_id"], {}).update(line)
    return dict(sorted(rows.items()))


def series(lines: Iterable[dict[str, Any]], name: str, x: str = "rollout_id") -> tuple[list[float], list[float]]:
    """The values of one metric that are numbers, against `x` (rollout_id, step or time), in the order of `x`."""
    points = [(line[x], line[name]) for line in lines if isinstance(line.get(name), int | float)]
    points.sort(key=lambda point: point[0])
    return [point[0] for point in points], [point[1] for point in points]


def latest(lines: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The last value of every metric."""
    found: dict[str, Any] = {}
    for line in lines:
        found |= line
    return found


def names(lines: Iterable[dict[str, Any]]) -> list[str]:
    """Every metric's name, in the order of first appearance."""
    return list(dict.fromkeys(name for line in lines for name in line))
