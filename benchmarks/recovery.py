"""Recovery: seconds from the death of an engine until it serves the current weights again, against its cold start.

    python benchmarks/recovery.py --json recovery.json
    python benchmarks/recovery.py --device cuda -- --gpus-per-trainer 0.3 --gpus-per-engine 0.3

A whole fully asynchronous run of two engines with the control API and its healer. The cold start is a suspended engine's way back: from
the start of its process until it serves. The recovery begins with SIGKILL, so it also holds the noticing. Training must go on meanwhile,
with the other engine, in the same driver.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from report import machine, summary, table, write

ROOT = Path(__file__).parent.parent
ENGINE = "engine-1"
HEALING = {
    "--health-interval": "0.5",
    "--health-timeout": "5",
    "--mini-ft-poll-interval": "0.5",
    "--mini-ft-resume-delay": "0",
    "--mini-ft-cooldown": "0",
}


class Run:
    """A training run as a process, seen through its control API."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        flags = ["--config", options.config, "--run-root", str(folder), "--name", "recovery", "--console", "quiet", "--fully-async"]
        flags += ["--num-engines", "2", "--num-rollout", "1000000", "--no-save-on-signal", "--eval-interval", "1000000"]
        flags += ["--device", options.device, *options.more]
        flags += ["--api-server-port", str(port), "--mini-ft-controller", *(part for pair in HEALING.items() for part in pair)]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "OMP_NUM_THREADS": "1",
        }
        self.log = (folder / "log").open("w+")
        self.folder, self.url = folder / "recovery", f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "train_async.py"), *flags], cwd=ROOT, env=environment, stdout=self.log, stderr=self.log
        )
        self.client = httpx.Client(timeout=60.0)

    def wait(self, condition: Callable[[], bool], what: str, limit: float = 300.0) -> float:
        """Until `condition`; the time of that moment."""
        deadline = time.monotonic() + limit
        while not condition():
            assert self.process.poll() is None, f"the run ended: {self.tail()}"
            assert time.monotonic() < deadline, f"{what} took longer than {limit:g} s: {self.tail()}"
            time.sleep(0.02)
        return time.monotonic()

    def connect(self) -> None:
        token = self.folder / "api_token"
        self.wait(lambda: token.exists() and bool(token.read_text().strip()), "the control API")
        self.client.headers["Authorization"] = f"Bearer {token.read_text().strip()}"
        self.wait(self.answers, "the control API")

    def answers(self) -> bool:
        try:
            return self.client.get(f"{self.url}/health").status_code == 200
        except httpx.TransportError:
            return False

    def cell(self) -> dict[str, Any]:
        return self.client.get(f"{self.url}/cells/{ENGINE}").raise_for_status().json()

    def serves(self) -> bool:
        return any(condition["type"] == "Serving" and condition["status"] == "True" for condition in self.cell()["status"]["conditions"])

    def trained(self) -> int:
        path = self.folder / "metrics.jsonl"
        return path.read_text().count("train/loss") if path.exists() else 0

    def cold_start(self) -> float:
        self.client.patch(f"{self.url}/cells/{ENGINE}", json={"spec": {"suspend": True}}).raise_for_status()
        self.wait(lambda: self.cell()["status"]["phase"] == "Suspended", "the suspend")
        begin = self.wait(lambda: self.cell()["status"]["phase"] == "Pending", "the healer")
        return self.wait(self.serves, "the cold start") - begin

    def killed(self) -> bool:
        """The API refuses a fault when the cell has changed since it was looked at, as it does at every publish."""
        fault = {"kind": "kill", "resourceVersion": self.cell()["metadata"]["resourceVersion"]}
        answer = self.client.post(f"{self.url}/cells/{ENGINE}/inject-fault", json=fault)
        return answer.status_code != 409 and answer.raise_for_status().is_success

    def recovery(self) -> tuple[float, int]:
        """Seconds, and the rollouts that were trained meanwhile."""
        self.wait(self.killed, "a moment without a publish")
        before, begin = self.trained(), time.monotonic()
        self.wait(lambda: not self.serves(), "the noticing")
        return self.wait(self.serves, "the recovery") - begin, self.trained() - before

    def tail(self) -> str:
        self.log.flush()
        return "\n".join(Path(self.log.name).read_text().splitlines()[-20:])

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.client.close()
        self.log.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(ROOT / "recipes" / "tiny" / "run.toml"))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", help="also write the result to this file")
    parser.add_argument("more", nargs="*", help="further flags of the run, after --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), options)
        try:
            run.connect()
            run.wait(lambda: run.trained() > 0, "the first rollout")
            pairs = []
            for _ in range(options.repeats):
                run.wait(run.serves, "the engine")
                pairs.append((run.cold_start(), *run.recovery()))
        finally:
            run.close()
    report(options, pairs)


def report(options: argparse.Namespace, pairs: list[tuple[float, float, float]]) -> None:
    cold, recovered, trained = (summary(values) for values in zip(*pairs, strict=True))
    ratio = summary([back / start for start, back, _ in pairs])
    rows = [
        [name, f"{values['median']:.2f}", f"{values['least']:.2f} to {values['most']:.2f}"]
        for name, values in (
            ("cold start, s", cold),
            ("recovery after SIGKILL, s", recovered),
            ("recovery / cold start", ratio),
            ("rollouts trained meanwhile", trained),
        )
    ]
    print(table(["", "median", "spread"], rows))
    result = {"options": vars(options), "machine": machine(options.device), "cold_start": cold, "recovery": recovered, "ratio": ratio}
    write(options.json, result | {"trained_meanwhile": trained})


if __name__ == "__main__":
    main()
