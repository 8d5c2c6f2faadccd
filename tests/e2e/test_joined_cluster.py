"""A run that joins a cluster which it did not start, and leaves it as it was."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from miles.ray.worker_process import free_port


@pytest.fixture
def cluster(monkeypatch):
    """host:port of a cluster of one node with 4 CPUs that wants a token, and its process."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    folder = tempfile.mkdtemp(dir="/tmp")  # short: sockets live in it
    port = free_port()
    ray = Path(sys.executable).with_name("ray")
    command = [str(ray), "start", "--head", "--block", f"--port={port}", "--num-cpus=4", f"--temp-dir={folder}"]
    command += ["--include-dashboard=false", "--object-store-memory=200000000", "--disable-usage-stats"]
    with open(f"{folder}/log", "w+") as log:
        head = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 120
        while "Ray runtime started" not in Path(log.name).read_text():
            assert head.poll() is None, Path(log.name).read_text()
            assert time.monotonic() < deadline, Path(log.name).read_text()
            time.sleep(0.1)
        yield f"127.0.0.1:{port}", head
        family = psutil.Process(head.pid).children(recursive=True)
        os.killpg(head.pid, signal.SIGTERM)
        _, left = psutil.wait_procs([psutil.Process(head.pid), *family] if head.poll() is None else family, timeout=20)
        for process in left:
            process.kill()
        head.wait()
    shutil.rmtree(folder, ignore_errors=True)


def workers_on(head):
    return [p for p in psutil.Process(head.pid).children(recursive=True) if "WorkerProcess" in " ".join(p.cmdline())]


def test_a_run_joins_a_cluster_and_leaves_it_running(launch, cluster):
    address, head = cluster
    joined = launch("joined", "--ray-address", address, "--num-rollout", 2, "--console", "plain").end()
    assert joined.code == 0, joined.err
    assert f"joined the Ray cluster at {address}: 4 CPUs" in joined.out + joined.err
    assert [rollout for rollout, _ in joined.series("train/loss")] == [0, 1]
    assert head.poll() is None
    assert not workers_on(head), f"left on the cluster: {workers_on(head)}"

    killed = launch("killed", "--ray-address", address, "--num-rollout", 1000)
    killed.wait_for(lambda process: process.trained(1))
    workers = workers_on(head)
    assert workers
    killed.process.kill()
    killed.process.wait()
    psutil.wait_procs(workers, timeout=60)
    assert not workers_on(head), f"left on the cluster: {workers_on(head)}"
    assert head.poll() is None


def test_an_address_at_which_nobody_answers_is_one_line_at_once(launch):
    refused = launch("refused", "--ray-address", f"127.0.0.1:{free_port()}").end()
    assert refused.code == 2
    assert refused.err.startswith("miles: --ray-address: no Ray cluster answers at '127.0.0.1:")
    assert refused.err.count("\n") == 1
    assert refused.seconds < 60
