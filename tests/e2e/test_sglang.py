"""A whole run on a real SGLang server: fully asynchronous, of adapters, with Ray, and a server that dies on the way."""

import json
import os
import signal

import psutil
import pytest

from miles.engines.sglang.server import free_port
from tests.engines.contract import SERVER_PYTHON

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
FLAGS = ("--engine", "sglang", "--sglang-python", SERVER_PYTHON, "--device", "cpu", "--engine-start-timeout", 400)


def server_of(folder, run):
    """The process of the newest server of a run, by the log that it writes to."""
    log = str(folder / "logs" / "engine-0-sglang.log")
    found = []
    for process in psutil.process_iter(["cmdline", "create_time"]):
        command = process.info["cmdline"] or []
        if any(word.endswith("sglang/launcher.py") for word in command):
            try:
                if os.readlink(f"/proc/{process.pid}/fd/1") == log:
                    found.append((process.info["create_time"], process))
            except OSError:
                continue
    assert found, "no server of this run"
    return max(found, key=lambda pair: pair[0])[1]


@pytest.mark.case("C79")
@pytest.mark.case("C53")
def test_a_fully_asynchronous_run_survives_the_death_of_its_server(launch):
    run = launch(
        "sglang",
        *FLAGS,
        "--fully-async",
        "--lora-rank",
        4,
        "--num-rollout",
        6,
        "--no-eval-data",
        "--health-interval",
        0.5,
        "--api-server-port",
        free_port(),
        "--mini-ft-controller",
        "--mini-ft-poll-interval",
        0.5,
    )
    run.wait_for(lambda it: it.trained(2), limit=700)
    server_of(run.folder, run).send_signal(signal.SIGKILL)
    done = run.end(limit=800)
    assert done.code == 0, done.err
    assert len(done.series("train/loss")) == 6
    assert done.series("train/train_rollout_logprob_abs_diff")[0][1] < 1e-5, "the first rollout has no lag"
    groups = done.trained_groups()
    assert sorted(groups) == list(range(6))
    trained = [index for members in groups.values() for index in members]
    assert len(trained) == len(set(trained)) == 24
    samples = [json.loads(line) for path in (done.folder / "samples").glob("*.jsonl") for line in path.read_text().splitlines()]
    assert samples
    assert all(version >= 1 for sample in samples for _, _, version in sample["versions"]), "the checkpoint's own weights were served"
