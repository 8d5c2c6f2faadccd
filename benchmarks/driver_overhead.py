"""Driver overhead: seconds of a step whose engine and trainer do nothing; and samples a second through executor, reward and packing.

    python benchmarks/driver_overhead.py --json overhead.json

A whole asynchronous run in one process, with tracking, timeline and ledger. A step is the time between two publishes.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import null_run
from report import machine, summary, table, write

WARM_UP = 5
KINDS: dict[str, dict[str, object]] = {
    "8 groups of 8": {"--rollout-batch-size": 8, "--n-samples-per-prompt": 8},
    "64 groups of 8": {"--rollout-batch-size": 64, "--n-samples-per-prompt": 8},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="measured steps of one run")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", help="also write the result to this file")
    options = parser.parse_args()
    found: dict[str, list[float]] = {name: [] for name in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(options.repeats):
            for name, flags in list(KINDS.items())[:: 1 if repeat % 2 else -1]:
                steps = seconds(Path(folder), f"{name.replace(' ', '-')}-{repeat}", flags, options.steps)
                found[name].append(sorted(steps)[len(steps) // 2])
    samples = {name: int(str(flags["--rollout-batch-size"])) * int(str(flags["--n-samples-per-prompt"])) for name, flags in KINDS.items()}
    result: dict[str, Any] = {"machine": machine("cpu"), "steps": options.steps, "repeats": options.repeats}
    result["kinds"] = {
        name: {"step_seconds": summary(values), "samples_per_second": summary([samples[name] / value for value in values])}
        for name, values in found.items()
    }
    rows = []
    for name, kind in result["kinds"].items():
        step, rate = kind["step_seconds"], kind["samples_per_second"]
        spread = f"{step['least'] * 1e3:.1f} to {step['most'] * 1e3:.1f}"
        rows.append([name, f"{step['median'] * 1e3:.2f}", spread, f"{rate['median']:.0f}"])
    print(table(["batch", "ms a step", "spread", "samples/s"], rows))
    write(options.json, result)


def seconds(folder: Path, name: str, flags: dict[str, object], steps: int) -> list[float]:
    lines = null_run.run(folder, name, null_run.Pace(), flags | {"--num-rollout": steps + WARM_UP + 1, "--engine-max-running": 2048})
    taken = [line["perf/step_seconds"] for line in lines if "perf/step_seconds" in line]
    return taken[WARM_UP:-1]


if __name__ == "__main__":
    main()
