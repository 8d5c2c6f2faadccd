"""The sums recipe against TRL's GRPOTrainer: samples a second, and seconds to a held-out accuracy.

    python -m venv .venv-trl && .venv-trl/bin/pip install trl
    python benchmarks/against_trl.py speed --trl .venv-trl/bin/python
    python benchmarks/against_trl.py reward --trl .venv-trl/bin/python

Both have the same model, prompts, group size, optimizer, learning rates, clipped token-mean loss, float32, and all cores: TRL for each
phase in turn, miles one half for the engine and one for the trainer. `speed` has answers of a fixed length; `reward` is the
recipe as it stands. Times of `reward` count from the start of the first step, with the evaluations, without the loading
of libraries and weights.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from report import machine, summary, table, write

from miles.cli.get_model import get_model

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes/smollm2-sums"
WARM_UP = 2
Curve = tuple[list[float], list[tuple[int, float, float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "reward"))
    parser.add_argument("--trl", required=True, help="the Python of an environment with trl")
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=32, help="samples that TRL trains on at once")
    parser.add_argument("--length", type=int, help="tokens of an answer (default: 32 for speed, 5 for reward)")
    parser.add_argument("--steps", type=int, help="optimizer steps (default: 8 for speed, 24 for reward)")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each; seeds 0, 1, ...")
    parser.add_argument("--accuracy", type=float, default=0.85, help="held-out accuracy to be reached")
    parser.add_argument("--json", help="also write the result to this file")
    options = parser.parse_args()
    speed = options.what == "speed"
    options.length = options.length or (32 if speed else 5)
    options.steps = options.steps or (8 if speed else 24)
    found: dict[str, list[float]] = {"miles": [], "trl": [], "ratio": []}
    samples: dict[str, list[float]] = {"miles": [], "trl": []}
    curves: dict[str, list[Any]] = {"miles": [], "trl": []}
    with tempfile.TemporaryDirectory() as folder:
        model = get_model("smollm2-135m", Path("models"))
        runpy.run_path(str(RECIPE / "make_data.py"))["make"](Path(folder))
        for seed in range(options.repeats):
            for name in ("miles", "trl")[:: 1 if seed % 2 else -1]:
                side = run_miles if name == "miles" else run_trl
                steps, evals = side(model, Path(folder), seed, options)
                if speed:
                    seconds = median(after - before for before, after in zip(steps[WARM_UP:-1], steps[WARM_UP + 1 :], strict=True))
                    found[name].append(options.groups * options.siblings / seconds)
                else:
                    reached = next((e for e in evals if e[2] >= options.accuracy), (float("inf"), float("inf"), 0.0))
                    found[name].append(reached[1])
                    samples[name].append(reached[0] * options.groups * options.siblings)
                    curves[name].append(evals)
            ours, theirs = found["miles"][-1], found["trl"][-1]
            found["ratio"].append(ours / theirs if speed else theirs / ours)
    head = ["", "samples/s" if speed else f"seconds to {options.accuracy:.0%}", "spread", *([] if speed else ["samples"])]
    rows = []
    for name in ("miles", "trl"):
        told = summary(found[name])
        rows.append([name, f"{told['median']:.1f}", f"{told['least']:.1f} to {told['most']:.1f}"])
        rows[-1] += [] if speed else [f"{median(samples[name]):.0f}"]
    ratio = summary(found["ratio"])
    rows.append(["ratio", f"{ratio['median']:.2f}", f"{ratio['least']:.2f} to {ratio['most']:.2f}", *([] if speed else [""])])
    print(table(head, rows))
    result = {"machine": machine("cpu"), "options": vars(options), "found": {k: summary(v) for k, v in found.items()}}
    write(options.json, result | {"samples": samples, "curves": curves})


def run_miles(model: Path, data: Path, seed: int, options: argparse.Namespace) -> Curve:
    """Seconds at which each step ended, and (step, seconds, accuracy) of each evaluation; from the start of the first rollout."""
    threads = max((os.cpu_count() or 2) // 2, 1)
    name = f"miles-{seed}"
    flags: dict[str, Any] = {
        "--hf-checkpoint": model,
        "--prompt-data": data / "train.jsonl",
        "--eval-data": f"sums={data / 'held_out.jsonl'}",
        "--rollout-batch-size": options.groups,
        "--n-samples-per-prompt": options.siblings,
        "--max-response-length": options.length,
        "--num-rollout": options.steps,
        "--engine-max-context": -(-(options.length + 48) // 64) * 64,
        "--engine-max-running": options.groups * options.siblings,
        "--trainer-threads": threads,
        "--engine-threads": threads,
        "--seed": seed,
        "--run-root": data,
        "--name": name,
        "--console": "quiet",
    }
    command = [sys.executable, str(ROOT / "train_async.py"), "--config", str(RECIPE / "run.toml")]
    command += [str(part) for pair in flags.items() for part in pair]
    command += ["--ignore-eos", "--skip-eval-before-train", "--eval-interval", "1000"] if options.what == "speed" else []
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"miles ended with {done.returncode}:\n{done.stderr[-2000:]}")
    lines = [json.loads(line) for line in (data / name / "metrics.jsonl").read_text().splitlines()]
    began = min(event["ts"] for event in json.loads((data / name / "timeline.json").read_text()) if "ts" in event) / 1e6
    steps, evals = [], []
    for line in lines:
        if "perf/step_seconds" in line:
            steps.append(line["time"] - began)
        elif "eval/sums/reward" in line:
            evals.append((len(steps), line["time"] - began, line["eval/sums/reward"]))
    return steps, evals


def run_trl(model: Path, data: Path, seed: int, options: argparse.Namespace) -> Curve:
    """As `run_miles`, of TRL."""
    speed = options.what == "speed"
    job = {
        "model": str(model),
        "train": str(data / "train.jsonl"),
        "held_out": str(data / "held_out.jsonl"),
        "steps": options.steps,
        "groups": options.groups,
        "siblings": options.siblings,
        "micro_batch": options.micro_batch,
        "length": options.length,
        "fixed_length": speed,
        "lr": 1.5e-5,
        "min_lr": 3e-6,
        "eval_interval": 0 if speed else 8,
        "threads": os.cpu_count() or 2,
        "seed": seed,
    }
    command = [options.trl, str(ROOT / "benchmarks/trl_grpo.py")]
    environment = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "PYTHONPATH")}
    done = subprocess.run(command, input=json.dumps(job), env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"TRL ended with {done.returncode}:\n{done.stderr[-2000:]}")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"seconds"')]
    evals = [(line["eval_step"], line["seconds"], line["accuracy"]) for line in lines if "eval_step" in line]
    return [line["seconds"] for line in lines if "step" in line], evals


if __name__ == "__main__":
    main()
