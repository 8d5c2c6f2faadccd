"""The quick start's table says what the run's metrics say, and its flags fit the machine."""

import os
import runpy
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "quickstart.py"


@pytest.fixture(scope="module")
def quickstart() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_the_table_compares_the_first_and_the_last_evaluation(quickstart: dict[str, Any]) -> None:
    lines: list[dict[str, Any]] = [{"rollout_id": 0, "eval/sums/reward": 0.453, "eval/sums/count": 64.0}]
    for rollout in range(16):
        lines.append({"rollout_id": rollout, "rollout/reward": rollout / 16, "train/weight_lag_max": float(rollout > 0)})
        lines.append({"rollout_id": rollout, "perf/step_seconds": 5.0, "perf/overlap_efficiency": 0.9})
    lines.append({"rollout_id": 15, "eval/sums/reward": 0.906, "eval/sums/count": 64.0})
    terminal = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    terminal.print(quickstart["report"](lines, 205.0))
    table = {tuple(line.split()) for line in terminal.export_text().splitlines()}
    for row in (
        "right answers to 64 held-out sums 45% 91%",
        "reward in training, first and last 2 rollouts 0.03 0.91",
        "rollouts trained 16",
        "lag of the samples, in weight versions 1",
        "seconds a step 5.0",
        "the run from start to end 3 min 25 s",
    ):
        assert tuple(row.split()) in table


@pytest.mark.parametrize(
    ("cores", "each", "fractions"), [(1, "1", True), (2, "1", False), (3, "1", False), (8, "4", False), (64, "8", False)]
)
def test_cores_are_shared_out(quickstart: dict[str, Any], cores: int, each: str, fractions: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    flags = quickstart["threads"]()
    assert flags[:4] == ["--trainer-threads", each, "--engine-threads", each]
    assert ("--cpus-per-engine" in flags) == fractions
