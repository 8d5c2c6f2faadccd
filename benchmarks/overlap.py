"""Overlap: the steps of an asynchronous run against those of the best synchronous one, with a reward that takes its time.

    python benchmarks/overlap.py --json overlap.json

The asynchronous run has half of the cores for the engine and half for the trainer, each held to its own; the synchronous one gives all of
them to each in turn, or half of them where that is faster, as on a machine that others use as well.
All have the same model, prompts, lengths and optimizer steps. Efficiency is (max(generation, training) + publish) / step, of the
asynchronous run, in which a rollout's rewards are waited for while the rollout before it is trained. The fully asynchronous run generates
the next groups meanwhile as well.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from report import machine, summary, table, write

from miles.tracking import waits

ROOT = Path(__file__).parent.parent
LATENCIES = (0, 50, 200)
KINDS = ("sync", "async", "fully async")
WARM_UP = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:tiny", help="--hf-checkpoint")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument("--length", type=int, default=64, help="tokens of every answer")
    parser.add_argument("--steps", type=int, default=12, help="measured steps of one run")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--latency", type=int, choices=LATENCIES, action="append", help="milliseconds of a reward; may be repeated")
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--json", help="also write the result to this file")
    parser.add_argument("more", nargs="*", help="further flags of the runs, after --")
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": machine("cpu"), "options": vars(options), "latencies": {}}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for latency in options.latency or LATENCIES:
            found: dict[str, list[float]] = {name: [] for name in (*KINDS, "efficiency", "ratio", "fully ratio")}
            for repeat in range(options.repeats):
                half = max(options.cores // 2, 1)
                for kind in KINDS[:: 1 if repeat % 2 else -1]:
                    runs = [
                        run(Path(folder), f"{kind}-{latency}-{repeat}-{threads}".replace(" ", "-"), kind, latency, options, threads=threads)
                        for threads in ({half, options.cores} if kind == "sync" else {half})
                    ]
                    step, efficiency = min(runs)
                    found[kind].append(step)
                    found["efficiency"] += [efficiency] if kind == "async" else []
                found["ratio"].append(found["sync"][-1] / found["async"][-1])
                found["fully ratio"].append(found["sync"][-1] / found["fully async"][-1])
                told = ", ".join(f"{name} {values[-1]:.3f}" for name, values in found.items())
                print(f"reward {latency} ms, repeat {repeat}, load {os.getloadavg()[0]:.1f}: {told}", file=sys.stderr, flush=True)
            told = result["latencies"][latency] = {name: summary(values) for name, values in found.items()}
            ratios = [
                f"{told[name]['median']:.2f} ({told[name]['least']:.2f} to {told[name]['most']:.2f})" for name in ("ratio", "fully ratio")
            ]
            steps = [f"{told[kind]['median'] * 1e3:.0f}" for kind in KINDS]
            rows.append([f"{latency} ms", *steps, *ratios, f"{told['efficiency']['median']:.3f}"])
    print(table(["reward", *(f"{kind} ms a step" for kind in KINDS), "sync / async", "sync / fully async", "efficiency"], rows))
    write(options.json, result)


def run(folder: Path, name: str, kind: str, latency: int, options: argparse.Namespace, *, threads: int) -> tuple[float, float]:
    """Median seconds of a step, and median overlap efficiency. `threads`: of the engine, and of the trainer."""
    flags = {
        "--hf-checkpoint": options.model,
        "--rollout-batch-size": options.groups,
        "--n-samples-per-prompt": options.siblings,
        "--max-response-length": options.length,
        "--engine-max-running": options.groups * options.siblings,
        "--engine-max-context": -(-(options.length + 64) // 64) * 64,
        "--num-rollout": options.steps + WARM_UP + 1,
        "--reward": f"waiting_rewards.wait_{latency}",
        "--trainer-threads": threads,
        "--engine-threads": threads,
        "--run-root": folder,
        "--name": name,
        "--console": "quiet",
        "--save-samples": 0,
    }
    driver = "train.py" if kind == "sync" else "train_async.py"
    command = [sys.executable, str(ROOT / driver), "--config", str(ROOT / "recipes/tiny/run.toml"), "--ignore-eos"]
    command += ["--fully-async"] if kind == "fully async" else []
    command += [str(part) for pair in flags.items() for part in pair] + options.more
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}"}
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        if kind != "sync" and "--in-process" not in options.more:
            cores = {"engine-0": range(threads), "actor-0": range(threads, max(options.cores, 1))}
            pin(process, folder / name, {worker: set(own) or {0} for worker, own in cores.items()})
        assert process.wait() == 0, (folder / f"{name}.log").read_text()
    steps = steps_of(folder / name)[WARM_UP:-1]
    return median(line["perf/step_seconds"] for line in steps), median(line["perf/overlap_efficiency"] for line in steps)


def steps_of(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if "perf/step_seconds" in line]


def pin(process: subprocess.Popen[bytes], run: Path, cores: dict[str, set[int]]) -> None:
    """Hold workers, with all their threads, to their cores, before the first step that counts."""
    left = dict(cores)
    while left and process.poll() is None:
        beats = waits.read(run / "logs")
        for worker in [worker for worker in left if worker in beats]:
            for thread in Path(f"/proc/{beats[worker].pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), left[worker])
            del left[worker]
        time.sleep(0.05)
    assert len(steps_of(run)) <= WARM_UP, "the workers were not held to their cores in time"


if __name__ == "__main__":
    main()
