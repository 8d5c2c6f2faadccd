"""The quick start: a small language model learns sums on this machine. `make quickstart` runs it.

Flags are handed on to the run: `make quickstart ARGS="--seed 1"`.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from miles.cli.get_model import get_model

ROOT = Path(__file__).resolve().parent.parent
RECIPE = Path("recipes/smollm2-sums")
RUN = Path("runs/quickstart")
EVAL = "eval/sums/reward"
terminal = Console()


def miles(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "miles.cli.main", *arguments], check=False).returncode


def threads() -> list[str]:
    """One thread for the trainer and one for the engine on two cores; larger machines share theirs out. Flags say otherwise."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    each = max(1, min(8, cores // 2))
    slots = ["--cpus-per-trainer", "0.5", "--cpus-per-engine", "0.5"] if cores < 2 else []
    return ["--trainer-threads", str(each), "--engine-threads", str(each), *slots]


def read_metrics() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RUN / "metrics.jsonl").read_text().splitlines()]


def column(lines: list[dict[str, Any]], name: str) -> list[float]:
    return [line[name] for line in lines if isinstance(line.get(name), int | float)]


def report(lines: list[dict[str, Any]], seconds: float) -> Table:
    """What the run did, as a table of before and after."""
    accuracy, reward = column(lines, EVAL), column(lines, "rollout/reward")
    few = max(1, len(reward) // 8)
    table = Table(title="Quick start", title_justify="left", show_header=True, header_style="dim", box=None, padding=(0, 2))
    for name in ("", "before", "after"):
        table.add_column(name, justify="left" if not name else "right")
    held_out = int(column(lines, "eval/sums/count")[-1])
    table.add_row(f"right answers to {held_out} held-out sums", f"{accuracy[0]:.0%}", f"[bold green]{accuracy[-1]:.0%}[/]")
    table.add_row(f"reward in training, first and last {few} rollouts", f"{sum(reward[:few]) / few:.2f}", f"{sum(reward[-few:]) / few:.2f}")
    for name, values, form in (
        ("rollouts trained", [float(len(reward))], "{:.0f}"),
        ("lag of the samples, in weight versions", [max(column(lines, "train/weight_lag_max"), default=0.0)], "{:.0f}"),
        ("overlap of generating and training", column(lines, "perf/overlap_efficiency"), "{:.0%}"),
        ("seconds a step", column(lines, "perf/step_seconds"), "{:.1f}"),
    ):
        if values:
            table.add_row(name, "", form.format(sum(values) / len(values)))
    table.add_row("the run from start to end", "", f"{int(seconds) // 60} min {int(seconds) % 60:02} s")
    return table


def main(flags: list[str]) -> int:
    os.chdir(ROOT)
    terminal.rule("[bold]1 of 3[/]  model and data", align="left")
    try:
        model = get_model("smollm2-135m", Path("models"))
    except ValueError as error:
        print(f"quick start: {error}", file=sys.stderr)
        return 1
    runpy.run_path(str(RECIPE / "make_data.py"))["make"](Path("data/sums"))
    print(f"{model}, data/sums/train.jsonl, data/sums/held_out.jsonl")

    terminal.rule("[bold]2 of 3[/]  the model learns: one process answers, another trains on the answers", align="left")
    print("The first score and the first step take about half a minute.", flush=True)
    started = time.monotonic()
    code = miles("train-async", "--config", str(RECIPE / "run.toml"), "--name", RUN.name, *threads(), *flags)
    if code != 0:
        print(f"quick start: the run ended with exit code {code}; {RUN}/logs/ says more", file=sys.stderr)
        return code
    seconds = time.monotonic() - started

    terminal.rule("[bold]3 of 3[/]  what happened", align="left")
    code = miles("plot", str(RUN))
    terminal.print(report(read_metrics(), seconds))
    terminal.print("\nNext:")
    for command, what in (
        (f".venv/bin/miles show {RUN}", "its last steps as a table"),
        (f".venv/bin/miles train-async --config {RECIPE}/fully_async.toml", "the same, generation never stops"),
        (".venv/bin/miles train-async --help", "every setting; docs/own-reward.md: your own task"),
    ):
        terminal.print(f"  {command}  [dim]# {what}[/]", highlight=False, soft_wrap=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
