"""Whole runs of the drivers on the tiny recipe: in this process where only the result counts, as a process where its end counts."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

import train_async
from miles.tracking import ledger

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "recipes" / "tiny" / "run.toml")
TIMES = re.compile(r"^(perf/|time$)")


@dataclass
class Finished:
    """What a run left behind."""

    folder: Path
    code: int = 0
    out: str = ""
    err: str = ""
    seconds: float = 0.0

    @property
    def lines(self):
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def series(self, name):
        """(rollout_id, value) of one metric, in the order logged."""
        return [(line["rollout_id"], line[name]) for line in self.lines if name in line]

    def values(self):
        """Every value that a second run must repeat: all but times."""
        found = [{name: value for name, value in line.items() if not TIMES.match(name)} for line in self.lines]
        return [line for line in found if set(line) - {"rollout_id", "step"}]

    def histories(self):
        """Group -> what became of it, without times."""
        return ledger.histories(ledger.read(self.folder / "ledger.jsonl"))

    def weights(self):
        """Name -> bytes of every tensor of the newest checkpoint's actor, optimizer and random state."""
        newest = max((self.folder / "checkpoints").glob("rollout_*/COMPLETE")).parent
        reader = FileSystemReader(newest / "actor")
        state = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in reader.read_metadata().state_dict_metadata.items()
        }
        dcp.load(state, storage_reader=reader, no_dist=True)
        return {name: (tensor.dtype, tensor.numpy().tobytes()) for name, tensor in state.items()}

    def trained_groups(self, last=None):
        """rollout_id -> group indices, by the ledger."""
        groups = {}
        for line in map(json.loads, (self.folder / "ledger.jsonl").read_text().splitlines()):
            if line["event"] == "trained" and (last is None or line["rollout_id"] <= last):
                groups.setdefault(line["rollout_id"], []).append(line["group_index"])
        return groups


def argv(folder, name, *flags):
    return ["--config", RECIPE, "--run-root", str(folder), "--name", name, "--console", "quiet", *map(str, flags)]


@pytest.fixture
def drive(tmp_path, monkeypatch):
    """Run a driver in this process: drive("name", "--flag", value, ...)."""
    monkeypatch.chdir(ROOT)
    hook, handlers = sys.excepthook, {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}

    def call(name, *flags, driver=train_async):
        driver.main(argv(tmp_path, name, "--in-process", *flags))
        return Finished(tmp_path / name)

    call.folder = tmp_path
    yield call
    assert {signum: signal.getsignal(signum) for signum in handlers} == handlers, "the run kept the signals"
    sys.excepthook = hook


class Process:
    """A driver in a process of its own, and all that it starts."""

    def __init__(self, folder, name, *flags, driver="train_async.py"):
        self.folder = folder / name
        self.out, self.err = (open(folder / f"{name}.{kind}", "w+") for kind in ("out", "err"))  # noqa: SIM115
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(ROOT / driver), *argv(folder, name, *flags)]
        self.started = time.monotonic()
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=self.out, stderr=self.err, start_new_session=True)
        self.family = {}

    def look(self):
        for child in psutil.Process(self.process.pid).children(recursive=True):
            self.family[child.pid] = child

    def wait_for(self, condition, limit=280):
        """Until `condition(self)`; fails when the process ends before."""
        while not condition(self):
            assert self.process.poll() is None, f"ended before: {self.read(self.err)}"
            assert time.monotonic() - self.started < limit, f"too slow: {self.read(self.err)}"
            self.look()
            time.sleep(0.05)
        self.look()

    def trained(self, rollouts):
        path = self.folder / "metrics.jsonl"
        return path.exists() and path.read_text().count("train/loss") >= rollouts

    def worker(self, name):
        """The process of a worker, by its log file, which it has open."""
        log = str(self.folder / "logs" / f"{name}.log")
        for child in self.family.values():
            try:
                if os.readlink(f"/proc/{child.pid}/fd/2") == log:
                    return child
            except OSError:
                continue
        raise AssertionError(f"no process of {name}")

    def end(self, limit=280):
        """Wait for the end, and assert that nothing is left."""
        while self.process.poll() is None:
            if time.monotonic() - self.started > limit:
                os.killpg(self.process.pid, signal.SIGKILL)
                raise AssertionError(f"did not end within {limit} s: {self.read(self.err)}")
            try:
                self.look()
            except psutil.NoSuchProcess:
                break
            time.sleep(0.05)
        code = self.process.wait()
        deadline = time.monotonic() + 5
        while (left := [p for p in self.family.values() if lives(p)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, f"processes of the run are left: {[p.name() for p in left]}"
        return Finished(self.folder, code, self.read(self.out), self.read(self.err), time.monotonic() - self.started)

    @staticmethod
    def read(file):
        return Path(file.name).read_text()


def lives(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def launch(tmp_path):
    """Start a driver as a process: launch("name", "--flag", value, ...)."""
    started = []

    def start(name, *flags, driver="train_async.py"):
        started.append(Process(tmp_path, name, *flags, driver=driver))
        return started[-1]

    yield start
    for process in started:
        if process.process.poll() is None:
            os.killpg(process.process.pid, signal.SIGKILL)
            process.process.wait()
        for child in process.family.values():
            if lives(child):
                child.kill()
        process.out.close()
        process.err.close()
