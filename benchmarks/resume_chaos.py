"""P8: runs that are killed, again and again, and resumed, against the run that never was.

    python benchmarks/resume_chaos.py --kills 200
    python benchmarks/resume_chaos.py --kills 40 --modes ray

Each trial starts a run of the tiny recipe, kills it with SIGKILL, at a random moment or at a named point of
`miles/fault_tolerance/kill_points.py`, and goes on by the same command or by `--resume`, in turn, until it ends. In one process everything
dies at once; under Ray it is the driver alone, the executor, a trainer, an engine, or all of them. Where a mode promises it, every tensor
of the last checkpoint (weights, optimizer, random state), every metric but times, and what became of every group are those of the run that
was never killed. Else the books balance, every prompt was trained once in each epoch, and no token was older than --max-weight-staleness.
"""

import argparse
import json
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from lives import ALL, DRIVER, ROOT, Nursery, Strike
from torch.distributed.checkpoint import FileSystemReader

from miles.fault_tolerance.kill_points import POINTS
from miles.tracking import ledger

RECIPE = str(ROOT / "recipes" / "tiny" / "run.toml")
ROLLOUTS, EPOCHS, STALENESS = 5, 2, 1
COMMON = ("--save-interval", "1", "--eval-interval", "2", "--max-response-length", "8")
FIXED = (*COMMON, "--num-rollout", str(ROLLOUTS))


class Mode(NamedTuple):
    flags: tuple[str, ...] = ()
    driver: str = "train_async.py"
    exact: bool = True  # equal bit for bit
    workers: tuple[str, ...] = ()  # under Ray, these; else in one process

    def argv(self) -> list[str]:
        place = ["--deterministic"] if self.workers and self.exact else [] if self.workers else ["--in-process"]
        return [*FIXED, *place, *self.flags]


SCHEDULED = ("--fully-async", "--deterministic")
BY_EPOCH = (
    *("--fully-async", "--num-epoch", str(EPOCHS), "--num-rollout", "6", "--rollout-batch-size", "16", "--n-samples-per-prompt", "2"),
    *("--max-weight-staleness", str(STALENESS), "--max-concurrent-groups", "6"),
)
ONE = ("executor", "actor-0", "engine-0")
TWO_TRAINERS, TWO_ENGINES = (*ONE, "actor-1"), (*ONE, "engine-1")
MODES = {
    "plain": Mode(),
    "publish every 3": Mode(("--update-weights-interval", "3")),
    "critic": Mode(("--advantage-estimator", "ppo")),
    "fully async, on schedule": Mode(SCHEDULED),
    "fully async, every 2": Mode((*SCHEDULED, "--update-weights-interval", "2", "--max-weight-staleness", "1")),
    "filtered": Mode(("--group-filter", "reward_spread", "--update-weights-interval", "2", "--save-interval", "2")),
    "synchronous": Mode(driver="train.py"),
    "fully async": Mode(BY_EPOCH, exact=False),
    "fully async, keep": Mode((*BY_EPOCH, "--staleness-policy", "keep"), exact=False),
    "ray, plain": Mode(workers=ONE),
    "ray, two trainers": Mode(("--num-trainers", "2"), workers=TWO_TRAINERS),
    "ray, fully async, on schedule": Mode(SCHEDULED, workers=ONE),
    "ray, synchronous": Mode(driver="train.py", workers=ONE),
    "ray, fully async": Mode((*BY_EPOCH, "--num-engines", "2"), exact=False, workers=TWO_ENGINES),
}
TIMES = re.compile(r"^(perf/|time$)")
MOST_LIVES = 6


@dataclass
class Outcome:
    """What a run left behind, without times."""

    weights: dict[str, bytes]
    metrics: list[dict[str, Any]]
    groups: dict[int, list[dict[str, Any]]]

    def differences(self, other: "Outcome") -> list[str]:
        found = [name for name in ("weights", "metrics", "groups") if self.__dict__[name] != other.__dict__[name]]
        if "metrics" in found:
            found += [f"{mine} / {its}" for mine, its in zip(self.metrics, other.metrics, strict=False) if mine != its][:1]
            found.append(f"{len(self.metrics)} and {len(other.metrics)} lines")
        if "groups" in found:
            odd = [group for group in self.groups | other.groups if self.groups.get(group) != other.groups.get(group)]
            found += [f"{self.groups.get(group)} / {other.groups.get(group)}" for group in odd[:1]]
        return found


def outcome(folder: Path) -> Outcome:
    newest = max((folder / "checkpoints").glob("rollout_*/COMPLETE")).parent
    weights = {}
    for role in sorted(path.name for path in newest.iterdir() if (path / ".metadata").exists()):
        reader = FileSystemReader(newest / role)
        entries = reader.read_metadata().state_dict_metadata
        state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
        with warnings.catch_warnings(action="ignore"):
            dcp.load(state, storage_reader=reader, no_dist=True)
        weights |= {f"{role} {name}": tensor.numpy().tobytes() for name, tensor in state.items()}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [{name: value for name, value in line.items() if not TIMES.match(name)} for line in lines]
    books = ledger.balance(ledger.read(folder / "ledger.jsonl"))
    assert books.holds, books.faults
    groups = ledger.histories(ledger.read(folder / "ledger.jsonl"))
    return Outcome(weights, [line for line in metrics if set(line) - {"rollout_id", "step"}], groups)


@dataclass
class Trial:
    mode: str
    kills: list[str]
    lives: int
    repeated: int  # rollouts that were trained again
    wrong: list[str]


class Chaos:
    """Trials against one reference run per mode."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.nursery = Nursery()
        self.whole: dict[str, tuple[Outcome, float]] = {}

    def argv(self, name: str, mode: str) -> list[str]:
        return ["--config", RECIPE, "--run-root", str(self.root), "--name", name, "--console", "quiet", *MODES[mode].argv()]

    def next_argv(self, name: str, mode: str, life: int) -> list[str]:
        """The same command again, or --resume, in turn."""
        folder = self.root / name
        return ["--resume", str(folder), "--console", "quiet"] if life % 2 and _saved(folder) >= 0 else self.argv(name, mode)

    def reference(self, mode: str) -> tuple[Outcome, float]:
        """The outcome of the run that is never killed, and its seconds."""
        if mode not in self.whole:
            name = f"whole-{list(MODES).index(mode)}"
            started = time.monotonic()
            code, _ = self.nursery.run(MODES[mode].driver, self.argv(name, mode), self.root / name)
            assert code == 0, (self.root / f"{name}.log").read_text()
            self.whole[mode] = outcome(self.root / name), time.monotonic() - started
        return self.whole[mode]

    def trial(self, name: str, mode: str, kills: list[str | Strike]) -> Trial:
        """One run that is killed at each of `kills` in turn (a named point, or from outside), then left alone."""
        whole, _ = self.reference(mode)
        folder, done, repeated, left = self.root / name, [], 0, []
        for life in range(MOST_LIVES):
            kill = kills[life] if life < len(kills) else None
            flags = ["--debug-kill", kill] if isinstance(kill, str) else []
            strike = kill if isinstance(kill, Strike) else None
            code, lived = self.nursery.run(MODES[mode].driver, [*self.next_argv(name, mode, life), *flags], folder, strike)
            left += lived.left() if MODES[mode].workers else []
            if code != 0 or lived.struck:
                done.append(str(kill))
            if code == 0:
                break
            # Who loses a worker ends in order, and names it.
            if code != -signal.SIGKILL and not (code == 1 and MODES[mode].workers and kill is not None):
                return Trial(mode, done, life + 1, repeated, [f"exit code {code}: {(self.root / f'{name}.log').read_text()[-2000:]}"])
            repeated += lived.trained() - _saved(folder)
        found = outcome(folder)
        wrong = left + (whole.differences(found) if MODES[mode].exact else unsound(folder))
        if not wrong:
            shutil.rmtree(folder)
        return Trial(mode, done, life + 1, repeated, wrong)


def _saved(folder: Path) -> int:
    """The last rollout saved."""
    return max((int(path.parent.name[-6:]) for path in (folder / "checkpoints").glob("rollout_*/COMPLETE")), default=-1)


def unsound(folder: Path) -> list[str]:
    """What is wrong with a finished run whose numbers depend on timing: lost or repeated prompts, open books, tokens that were too old."""
    lines = list(ledger.read(folder / "ledger.jsonl"))
    books, wrong = ledger.balance(lines), []
    if not books.holds or books.open or books.ended["abandoned"]:
        wrong.append(f"books: {books}; {books.faults}")
    prompts = {line["group_index"]: (line["epoch"], line["prompt"]) for line in lines if line["event"] == "taken"}
    trained = Counter(prompts[line["group_index"]] for line in lines if line["event"] == "trained")
    rows = {prompt for _, prompt in prompts.values()}
    if trained != Counter((epoch, row) for epoch in range(EPOCHS) for row in rows):
        wrong.append(
            f"not once per epoch: {[entry for entry in trained.items() if entry[1] > 1]}, {trained.total()} of {EPOCHS * len(rows)}"
        )
    oldest: dict[int, int] = {}
    for line in lines:
        if line["event"] in ("finished", "trimmed"):
            oldest[line["group_index"]] = line["version"]
        if line["event"] == "drained" and not 0 <= line["version"] - oldest[line["group_index"]] <= STALENESS:
            wrong.append(f"too old: {line}, its oldest token {oldest[line['group_index']]}")
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    if [step["rollout_id"] for step in steps if "train/loss" in step] != list(range(len(trained) // 16)):
        wrong.append("rollouts are not one after the other")
    lags = [step[name] for step in steps for name in ("rollout/weight_lag_max", "train/weight_lag_max") if name in step]
    if not 0 <= min(lags) <= max(lags) <= STALENESS:
        wrong.append(f"lags {lags}")
    return wrong


def draw(rng: random.Random, points: list[str], seconds: float, workers: tuple[str, ...] = ()) -> list[str | Strike]:
    """One to three kills: a random moment, or a named point. Under Ray also of one worker alone, or of everything."""
    return [_strike(rng, seconds, workers) if rng.random() < 0.4 else _point(rng, points) for _ in range(rng.choice((1, 1, 2, 3)))]


def _point(rng: random.Random, points: list[str]) -> str:
    return f"{rng.choice(points)}@{rng.randrange(ROLLOUTS + 2)}"


def _strike(rng: random.Random, seconds: float, workers: tuple[str, ...]) -> Strike:
    if not workers:
        return Strike(DRIVER, -1, rng.uniform(0.05, seconds))
    return Strike(rng.choice((DRIVER, ALL, *workers)), rng.randrange(-1, ROLLOUTS - 1), rng.uniform(0.0, 2.0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modes", nargs="+", default=["in-process"], help=f"in-process, ray, or some of: {', '.join(MODES)}")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    options = parser.parse_args()
    groups = {"in-process": [name for name in MODES if not MODES[name].workers], "ray": [name for name in MODES if MODES[name].workers]}
    modes = [mode for name in options.modes for mode in groups.get(name, [name])]
    rng, started, trials = random.Random(options.seed), time.monotonic(), []
    root = Path(tempfile.mkdtemp(prefix="resume-chaos-"))
    chaos = Chaos(root)
    points = [point for point in POINTS if point != "critic_saved"]
    while sum(len(trial.kills) for trial in trials) < options.kills and time.monotonic() - started < options.seconds:
        mode = modes[len(trials) % len(modes)]
        seconds = chaos.reference(mode)[1]
        trials.append(chaos.trial(f"trial-{len(trials)}", mode, draw(rng, points, seconds, MODES[mode].workers)))
        if trials[-1].wrong:
            print(f"WRONG: {trials[-1]} in {root}", flush=True)
    chaos.nursery.close()
    report(trials, options.json, options.seed)
    if not any(trial.wrong for trial in trials):
        shutil.rmtree(root)
    return int(any(trial.wrong for trial in trials))


def report(trials: list[Trial], out: Path | None, seed: int) -> None:
    kills = Counter(re.split("[@,]", kill)[0] for trial in trials for kill in trial.kills)
    print("| mode | trials | kills | held | rollouts trained again per kill |\n|---|---|---|---|---|")
    for mode in dict.fromkeys(trial.mode for trial in trials):
        mine = [trial for trial in trials if trial.mode == mode]
        killed = sum(len(trial.kills) for trial in mine)
        equal = sum(not trial.wrong for trial in mine)
        print(f"| {mode} | {len(mine)} | {killed} | {equal} | {sum(trial.repeated for trial in mine) / max(killed, 1):.2f} |")
    print("\nkilled at: " + ", ".join(f"{point} {count}" for point, count in kills.most_common()))
    if out is not None:
        found = {"seed": seed, "torch": torch.__version__, "kills": sum(kills.values()), "at": kills}
        out.write_text(json.dumps(found | {"trials": [trial.__dict__ for trial in trials]}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
