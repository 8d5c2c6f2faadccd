"""Real runs in which one part is slow on purpose say which one it is."""

import json
import time

import pytest

from miles.tracking.critical_path import PARTS
from miles.train.trainer import Trainer
from tests.e2e.slow import WAIT
from tests.tracking.trace_rules import check

pytestmark = pytest.mark.filterwarnings("default")  # as users run it


def path(run, part):
    return [value for _, value in run.series(f"perf/critical_path/{part}_seconds")]


@pytest.mark.parametrize(
    ("part", "flags"),
    [
        ("reward", ("--reward", "tests.e2e.slow.reward")),
        ("reward", ("--reward", "tests.e2e.slow.reward", "--fully-async", "--max-concurrent-groups", 4)),
        ("generation", ("--generate-function", "tests.e2e.slow.generate")),
        ("training", ()),
    ],
)
def test_the_slow_part_is_named(drive, monkeypatch, part, flags):
    if part == "training":
        step = Trainer._optimizer_step

        def slow_step(self, batches, columns):
            time.sleep(WAIT)
            return step(self, batches, columns)

        monkeypatch.setattr(Trainer, "_optimizer_step", slow_step)
    run = drive("slow", "--num-rollout", 6, "--max-response-length", 4, *flags)
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["bound"].startswith(f"bound by {part}: ")
    assert summary["speedup"] > 1.2
    steps = list(zip(*(path(run, name) for name in PARTS), strict=True))
    assert len(steps) == 6
    shares = [dict(zip(PARTS, step, strict=True))[part] / sum(step) for step in steps[2:]]
    assert sorted(shares)[len(shares) // 2] > 0.5
    assert WAIT * 0.5 < summary["step"][part] < WAIT * 3
    check((run.folder / "timeline.json").read_text())
