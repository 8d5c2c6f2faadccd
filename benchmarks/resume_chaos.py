"""P8: runs that are killed, again and again, and resumed, against the run that never was.

    python benchmarks/resume_chaos.py --kills 200

Each trial starts a run of the tiny recipe in one process, kills it with SIGKILL, at a random moment or at a named point of
`miles/fault_tolerance/kill_points.py`, gives the same command again until it ends, and compares with the run that was never killed: every
tensor of the last checkpoint (weights, optimizer, random state), every metric but times, and what became of every group.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from miles.tracking import ledger

ROOT = Path(__file__).parents[1]
RECIPE = str(ROOT / "recipes" / "tiny" / "run.toml")
ROLLOUTS = 5
COMMON = ("--num-rollout", str(ROLLOUTS), "--save-interval", "1", "--eval-interval", "2", "--max-response-length", "8")
MODES: dict[str, tuple[str, ...]] = {
    "plain": (),
    "publish every 3": ("--update-weights-interval", "3"),
    "critic": ("--advantage-estimator", "ppo", "--use-tis"),
    "fully async, on schedule": ("--fully-async", "--deterministic"),
    "fully async, every 2": ("--fully-async", "--deterministic", "--update-weights-interval", "2", "--max-weight-staleness", "1"),
    "filtered": ("--group-filter", "reward_spread", "--update-weights-interval", "2", "--save-interval", "2"),
}
TIMES = re.compile(r"^(perf/|time$)")
MOST_LIVES = 6


class Nursery:
    """Starts runs as forks of one process that has imported everything: a run then takes a second instead of ten."""

    def __init__(self) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__)), "--nursery"]
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, argv: list[str], log: Path, kill_after: float | None = None) -> int:
        """The exit code of one run, -9 after a SIGKILL. `kill_after`: seconds after which it is killed from outside."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([argv, str(log)]), file=self._process.stdin, flush=True)
        pid = int(self._process.stdout.readline())
        if kill_after is not None:
            time.sleep(kill_after)
            os.kill(pid, signal.SIGKILL)
        print("", file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def serve() -> None:
    """The nursery's own process: a line [argv, log] starts a run, an empty line asks for its exit code."""
    import miles.engines.embedded.engine  # noqa: PLC0415
    import miles.rollout.rollout_executor  # noqa: PLC0415
    import miles.train.trainer  # noqa: F401, PLC0415
    import train_async  # noqa: PLC0415

    torch.set_num_threads(1)
    for line in sys.stdin:
        argv, log = json.loads(line)
        pid = os.fork()
        if pid == 0:
            file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(file, 1)
            os.dup2(file, 2)
            os.setsid()
            code = 0
            try:
                train_async.main(argv)
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            except BaseException:
                sys.excepthook(*sys.exc_info())
                code = 1
            sys.stderr.flush()
            os._exit(code)
        print(pid, flush=True)
        sys.stdin.readline()
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


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

    def __init__(self, root: Path, modes: dict[str, tuple[str, ...]] = MODES) -> None:
        self.root, self.modes = root, modes
        self.nursery = Nursery()
        self.whole: dict[str, tuple[Outcome, float]] = {}

    def argv(self, name: str, mode: str) -> list[str]:
        flags = ["--config", RECIPE, "--run-root", str(self.root), "--name", name, "--console", "quiet", "--in-process"]
        return [*flags, *COMMON, *self.modes[mode]]

    def reference(self, mode: str) -> tuple[Outcome, float]:
        """The outcome of the run that is never killed, and its seconds."""
        if mode not in self.whole:
            name = f"whole-{list(self.modes).index(mode)}"
            started = time.monotonic()
            code = self.nursery.run(self.argv(name, mode), self.root / f"{name}.log")
            assert code == 0, (self.root / f"{name}.log").read_text()
            self.whole[mode] = outcome(self.root / name), time.monotonic() - started
        return self.whole[mode]

    def trial(self, name: str, mode: str, kills: list[str | float]) -> Trial:
        """One run that is killed at each of `kills` in turn (a named point, or seconds after its start), then left alone."""
        whole, _ = self.reference(mode)
        log, done, trained, repeated = self.root / f"{name}.log", [], -1, 0
        for life in range(MOST_LIVES):
            kill = kills[life] if life < len(kills) else None
            flags = ["--debug-kill", kill] if isinstance(kill, str) else []
            code = self.nursery.run([*self.argv(name, mode), *flags], log, kill if isinstance(kill, float) else None)
            if code == 0:
                break
            done.append(f"{kill:.2f} s" if isinstance(kill, float) else str(kill))
            if code != -signal.SIGKILL:
                return Trial(mode, done, life + 1, repeated, [f"exit code {code}: {log.read_text()[-2000:]}"])
            trained, saved = self._progress(name)
            repeated += trained - saved
        found = outcome(self.root / name)
        wrong = whole.differences(found)
        if not wrong:
            shutil.rmtree(self.root / name)
        return Trial(mode, done, life + 1, repeated, wrong)

    def _progress(self, name: str) -> tuple[int, int]:
        """Last rollout trained, and last one saved."""
        folder = self.root / name
        lines = ledger.read(folder / "ledger.jsonl")
        trained = max((line["rollout_id"] for line in lines if line["event"] == "trained"), default=-1)
        saved = max((int(path.parent.name[-6:]) for path in (folder / "checkpoints").glob("rollout_*/COMPLETE")), default=-1)
        return trained, saved


def draw(rng: random.Random, points: list[str], seconds: float) -> list[str | float]:
    """One to three kills: a random moment, or a named point."""
    return [
        rng.uniform(0.05, seconds) if rng.random() < 0.4 else f"{rng.choice(points)}@{rng.randrange(ROLLOUTS + 2)}"
        for _ in range(rng.choice((1, 1, 2, 3)))
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nursery", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    options = parser.parse_args()
    if options.nursery:
        serve()
        return 0
    from miles.fault_tolerance.kill_points import POINTS  # noqa: PLC0415

    rng, started, trials = random.Random(options.seed), time.monotonic(), []
    root = Path(tempfile.mkdtemp(prefix="resume-chaos-"))
    chaos = Chaos(root)
    points = [point for point in POINTS if point != "critic_saved"]
    while sum(len(trial.kills) for trial in trials) < options.kills and time.monotonic() - started < options.seconds:
        mode = options.modes[len(trials) % len(options.modes)]
        seconds = chaos.reference(mode)[1]
        trials.append(chaos.trial(f"trial-{len(trials)}", mode, draw(rng, points, seconds)))
        if trials[-1].wrong:
            print(f"WRONG: {trials[-1]} in {root}", flush=True)
    chaos.nursery.close()
    report(trials, options.json, options.seed)
    if not any(trial.wrong for trial in trials):
        shutil.rmtree(root)
    return int(any(trial.wrong for trial in trials))


def report(trials: list[Trial], out: Path | None, seed: int) -> None:
    kills = Counter(kill.partition("@")[0] if "@" in kill else "a random moment" for trial in trials for kill in trial.kills)
    print("| mode | trials | kills | bitwise equal | rollouts trained again per kill |\n|---|---|---|---|---|")
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
