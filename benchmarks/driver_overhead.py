"""Driver overhead: seconds of a step whose engine and trainer do nothing; and samples a second through executor, reward and packing.

    python benchmarks/driver_overhead.py --json overhead.json

A whole asynchronous run in one process, with tracking, timeline and ledger. A step is the time between two publishes; the smallest
batch shows what it costs beside its samples.
"""

from __future__ import annotations

import argparse
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import null_run
from report import machine, summary, table, write

WARM_UP = 5
KINDS: dict[str, dict[str, object]] = {
    "1 group of 2": {"--rollout-batch-size": 1, "--n-samples-per-prompt": 2},
    "8 groups of 8": {"--rollout-batch-size": 8, "--n-samples-per-prompt": 8},
    "64 groups of 8": {"--rollout-batch-size": 64, "--n-samples-per-prompt": 8},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="measured steps of one run")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", help="also write the result to this file")
    options = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {name: {"step": [], "cpu": []} for name in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(options.repeats):
            for name, flags in list(KINDS.items())[:: 1 if repeat % 2 else -1]:
                step, cpu = seconds(Path(folder), f"{name.replace(' ', '-')}-{repeat}", flags, options.steps)
                found[name]["step"].append(step)
                found[name]["cpu"].append(cpu)
    samples = {name: int(str(flags["--rollout-batch-size"])) * int(str(flags["--n-samples-per-prompt"])) for name, flags in KINDS.items()}
    result: dict[str, Any] = {"machine": machine("cpu"), "steps": options.steps, "repeats": options.repeats}
    result["kinds"] = {
        name: {
            "step_seconds": summary(values["step"]),
            "step_cpu_seconds": summary(values["cpu"]),
            "samples_per_second": summary([samples[name] / value for value in values["step"]]),
            "samples_per_cpu_second": summary([samples[name] / value for value in values["cpu"]]),
        }
        for name, values in found.items()
    }
    rows = []
    for name, kind in result["kinds"].items():
        step, cpu = kind["step_seconds"], kind["step_cpu_seconds"]
        rates = [f"{kind[name]['median']:.0f}" for name in ("samples_per_second", "samples_per_cpu_second")]
        spread = f"{step['least'] * 1e3:.1f} to {step['most'] * 1e3:.1f}"
        rows.append([name, f"{step['median'] * 1e3:.1f}", spread, f"{cpu['median'] * 1e3:.1f}", *rates])
    print(table(["batch", "ms a step", "spread", "CPU ms", "samples/s", "samples/CPU s"], rows))
    write(options.json, result)


def seconds(folder: Path, name: str, flags: dict[str, object], steps: int) -> tuple[float, float]:
    """Of a step, medians: of the clock, and of this process on its cores."""
    pace = null_run.Pace()
    lines = null_run.run(folder, name, pace, flags | {"--num-rollout": steps + WARM_UP + 1, "--engine-max-running": 2048})
    taken = [line["perf/step_seconds"] for line in lines if "perf/step_seconds" in line]
    return median(taken[WARM_UP:-1]), median(after - before for before, after in pairwise(pace.cpu[WARM_UP:]))


if __name__ == "__main__":
    main()
