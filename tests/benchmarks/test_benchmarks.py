"""Every benchmark at its smallest size: not timed, only that it works and says what it found."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

ROOT = Path(__file__).parents[2]
# servers of their own, and trl
ELSEWHERE = {"sglang_engine.py", "against_trl.py", "trl_grpo.py"}
RUN_IN_E2E = {"resume_chaos.py", "lives.py"}  # its parts are what tests/e2e/test_resume_chaos.py works with
COMMANDS = {
    "rollout_tokens.py": ["--size", "ci", "--repeats", "1"],
    "publish_stall.py": ["--size", "ci", "--repeats", "2", "--mode", "retract"],
    "checkpoint_stall.py": ["--size", "ci", "--repeats", "1", "--save-hf"],
    "driver_overhead.py": ["--steps", "4", "--repeats", "1"],
    "executor_scale.py": ["--groups", "40", "--batch", "4", "--engines", "5", "--in-flight", "20", "--siblings", "2", "--scale", "0.001"],
    "recovery.py": ["--repeats", "1"],
    "waste.py": ["--rollouts", "4"],
    "overlap.py": ["--steps", "2", "--repeats", "1", "--latency", "50", "--groups", "2", "--siblings", "2", "--length", "8", "--cores=1"],
}


def run(name: str, folder: Path, *more: str) -> tuple[str, dict]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "benchmarks" / name), *COMMANDS[name], "--json", str(folder / "result.json"), *more]
    with subprocess.Popen(command, env=environment, stdout=PIPE, stderr=PIPE, text=True, start_new_session=True) as process:
        try:
            out, errors = process.communicate(timeout=280)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the runs that it started, if it is late
    assert process.returncode == 0, errors
    return out, json.loads((folder / "result.json").read_text())


def test_rollout_tokens(tmp_path: Path) -> None:
    out, result = run("rollout_tokens.py", tmp_path)
    assert out.count("|\n") >= 4
    assert set(result["tokens_per_second"]) == {"embedded engine", "model.generate, padded", "transformers continuous batching"}
    assert result["machine"]["torch"]


def test_publish_stall(tmp_path: Path) -> None:
    out, result = run("publish_stall.py", tmp_path)
    assert "shared_memory, retract" in out
    assert len(result["seconds"]["stall"]["all"]) == 2
    assert result["bytes"] > 0 < result["copy_bound"]


def test_checkpoint_stall(tmp_path: Path) -> None:
    out, result = run("checkpoint_stall.py", tmp_path)
    assert "| async stall |" in out
    assert result["bytes"] > 0 < result["seconds"]["async until on disk"]["median"]


def test_driver_overhead(tmp_path: Path) -> None:
    out, result = run("driver_overhead.py", tmp_path)
    assert "| 64 groups of 8 |" in out
    assert result["kinds"]["8 groups of 8"]["step_seconds"]["median"] > 0


def test_executor_scale(tmp_path: Path) -> None:
    out, result = run("executor_scale.py", tmp_path)
    assert "| samples a CPU second |" in out
    assert result["groups"] == 40
    assert (result["objects in the store at the end"], result["requests in flight at the end"]) == (0, 0)
    assert 4 <= result["requests in flight, most"] <= 20


@pytest.mark.slow
def test_recovery(tmp_path: Path) -> None:
    out, result = run("recovery.py", tmp_path)
    assert "| recovery / cold start |" in out
    assert result["trained"]["least"] > 0
    assert result["handed_over"]["least"] > 0, "nothing was under way, so nothing could be lost"
    assert result["lost"]["most"] == result["tokens_lost"]["most"] == 0


@pytest.mark.slow
def test_waste(tmp_path: Path) -> None:
    out, result = run("waste.py", tmp_path)
    assert "| fast trainer |" in out
    assert all(pace["waste"] <= 0.01 for pace in result["paces"].values())


@pytest.mark.slow
def test_overlap(tmp_path: Path) -> None:
    out, result = run("overlap.py", tmp_path, "--", "--in-process")  # nothing overlaps then, but the program does all that it does
    assert "| 50 ms |" in out
    assert result["latencies"]["50"]["ratio"]["median"] > 0


def test_every_benchmark_is_run_here_and_described() -> None:
    described = (ROOT / "benchmarks" / "README.md").read_text()
    programs = {path.name for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()}
    assert programs == set(COMMANDS) | ELSEWHERE | RUN_IN_E2E
    assert all(f"benchmarks/{name}" in described for name in programs)
