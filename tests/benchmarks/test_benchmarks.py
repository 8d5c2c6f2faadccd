"""Every benchmark at its smallest size: not timed, only that it works and says what it found."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ELSEWHERE = {"sglang_engine.py", "recovery.py"}  # one needs a server of its own; recovery is in tests/e2e/test_recovery.py
RUN_IN_E2E = {"resume_chaos.py"}  # its parts are what tests/e2e/test_resume_chaos.py works with
COMMANDS = {
    "rollout_tokens.py": ["--size", "ci", "--repeats", "1"],
    "publish_stall.py": ["--size", "ci", "--repeats", "2", "--mode", "retract"],
}


def run(name: str, folder: Path, *more: str) -> tuple[str, dict]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "benchmarks" / name), *COMMANDS[name], *more, "--json", str(folder / "result.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((folder / "result.json").read_text())


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


def test_every_benchmark_is_run_here_and_described() -> None:
    described = (ROOT / "benchmarks" / "README.md").read_text()
    programs = {path.name for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()}
    assert programs == set(COMMANDS) | ELSEWHERE | RUN_IN_E2E
    assert all(f"benchmarks/{name}" in described for name in programs)
