"""Recovery: seconds from the death of an engine until it serves the current weights again, against its cold start.

    python benchmarks/recovery.py --json recovery.json
    python benchmarks/recovery.py --device cuda -- --gpus-per-trainer 0.3 --gpus-per-engine 0.3

A whole fully asynchronous run of two engines with the control API and its healer. The cold start is a suspended engine's way back: from
the start of its process until it serves. The recovery begins with SIGKILL, so it also holds the noticing, and comes when all places of the
engine are taken by answers under way. Training must go on meanwhile, with the other engine, in the same driver: that one must not lose a
token, and what the dead one had must go to it. All answers are long, and equally so.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from report import machine, summary, table, write

from miles.tracking import ledger

ROOT = Path(__file__).parent.parent
ENGINE, OTHER, INDEX = "engine-1", "engine-0", "1"
RUNNING = 4  # answers at once in one engine
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
        flags += ["--ignore-eos", "--max-response-length", str(options.length), "--engine-max-context", str(options.length + 32)]
        flags += ["--engine-max-running", str(RUNNING), "--num-engines", "2"]
        flags += ["--num-rollout", "1000000", "--no-save-on-signal", "--eval-interval", "1000000"]
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

    def cell(self, name: str = ENGINE) -> dict[str, Any]:
        return self.client.get(f"{self.url}/cells/{name}").raise_for_status().json()

    def load(self, name: str) -> dict[str, int]:
        """What the engine's last probe told of its requests and tokens."""
        self.wait(lambda: self.cell(name)["status"]["load"] is not None, f"a probe of {name}")
        return self.cell(name)["status"]["load"]

    def serves(self) -> bool:
        return any(condition["type"] == "Serving" and condition["status"] == "True" for condition in self.cell()["status"]["conditions"])

    def trained(self) -> int:
        path = self.folder / "metrics.jsonl"
        return path.read_text().count("train/loss") if path.exists() else 0

    def well(self) -> int:
        """How often the healer closed a case. An engine that dies before that counts as one that cannot start: the next try waits."""
        return self.read_log().count(f"fault_tolerance.healer: {ENGINE} is well again")

    def cold_start(self) -> float:
        cases = self.well()
        self.client.patch(f"{self.url}/cells/{ENGINE}", json={"spec": {"suspend": True}}).raise_for_status()
        self.wait(lambda: self.cell()["status"]["phase"] == "Suspended", "the suspend")
        begin = self.wait(lambda: self.cell()["status"]["phase"] == "Pending", "the healer")
        seconds = self.wait(self.serves, "the cold start") - begin
        self.wait(lambda: self.well() > cases, "the healer's look")
        return seconds

    def killed(self) -> bool:
        """Only while it answers as much as it can. The API refuses a fault when the cell has changed since, as at every publish."""
        cell = self.cell()
        if (cell["status"]["load"] or {}).get("running") != RUNNING:
            return False
        fault = {"kind": "kill", "resourceVersion": cell["metadata"]["resourceVersion"]}
        answer = self.client.post(f"{self.url}/cells/{ENGINE}/inject-fault", json=fault)
        return answer.status_code != 409 and answer.raise_for_status().is_success

    def recovery(self) -> dict[str, float]:
        """Seconds, the rollouts that were trained meanwhile, and what became of requests and tokens."""
        requests, retried, cases, cut = self.failed_requests(), self.retried(), self.well(), self.load(OTHER)["tokensCut"]
        self.wait(self.killed, "a moment without a publish in which the engine is full")
        before, begin = self.trained(), time.monotonic()
        self.wait(lambda: not self.serves(), "the noticing")
        seconds = self.wait(self.serves, "the recovery") - begin
        self.wait(lambda: self.well() > cases, "the healer's look")
        failed = self.failed_requests() - requests
        return {
            "recovery": seconds,
            "trained": self.trained() - before,
            "handed_over": failed[INDEX],
            "lost": failed.total() - failed[INDEX],
            "tokens_lost": self.load(OTHER)["tokensCut"] - cut,
            "begun_again": self.retried() - retried,
        }

    def failed_requests(self) -> Counter[str]:
        """By the engine that had them, as the router tells of each."""
        return Counter(re.findall(r"engine (\d+) failed under request", (self.folder / "logs" / "executor.log").read_text()))

    def retried(self) -> int:
        """Groups that had to begin again: a request of theirs was cut off, and no engine went on with it."""
        return sum(line["event"] == "retried" for line in ledger.read(self.folder / "ledger.jsonl"))

    def read_log(self) -> str:
        return Path(self.log.name).read_text()

    def tail(self) -> str:
        return "\n".join(self.read_log().splitlines()[-20:])

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
    parser.add_argument("--length", type=int, default=224, help="tokens of every answer")
    parser.add_argument("--json", help="also write the result to this file")
    parser.add_argument("more", nargs="*", help="further flags of the run, after --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), options)
        try:
            run.connect()
            run.wait(lambda: run.trained() > 0, "the first rollout")
            found = [{"cold_start": run.cold_start()} | run.recovery() for _ in range(options.repeats)]
        finally:
            run.close()
    report(options, found)


def report(options: argparse.Namespace, found: list[dict[str, float]]) -> None:
    values = {key: summary([one[key] for one in found]) for key in found[0]}
    values["ratio"] = summary([one["recovery"] / one["cold_start"] for one in found])
    titles = {
        "cold_start": "cold start, s",
        "recovery": "recovery after SIGKILL, s",
        "ratio": "recovery / cold start",
        "trained": "rollouts trained meanwhile",
        "handed_over": f"requests of the dead engine, of {options.length} tokens each, that went to the other",
        "lost": "requests that the other engine lost",
        "tokens_lost": "tokens that the other engine lost",
        "begun_again": "groups begun again",
    }
    rows = [
        [title, f"{values[key]['median']:.2f}", f"{values[key]['least']:.2f} to {values[key]['most']:.2f}"] for key, title in titles.items()
    ]
    print(table(["", "median", "spread"], rows))
    write(options.json, {"options": vars(options), "machine": machine(options.device)} | values)


if __name__ == "__main__":
    main()
