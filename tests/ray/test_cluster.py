import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import ray

from miles.config.run_config import RunConfig
from miles.ray.cluster import Cluster, check_cpus
from miles.utils.orchestration_utils import init_orchestration_script


def test_far_more_workers_than_cpus_are_refused_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    data, model = "recipes/tiny/sums.jsonl", "random:tiny"
    args = RunConfig(hf_checkpoint=model, prompt_data={"sums": data}, run_root=str(tmp_path), num_rollout=1, num_engines=999)
    with pytest.raises(ValueError, match=rf"ask for 1000 and this machine has {os.cpu_count()}.*--num-engines.*--cpus-per-engine"):
        init_orchestration_script(args)
    assert not list(tmp_path.iterdir())
    check_cpus("10.0.0.1:6379", 1000.0)  # there may be so many


def test_a_ray_that_starts_too_slowly_is_started_again():
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:  # this one may have a Ray already, and has one at most
        process.submit(_start_slowly_once).result(timeout=200)


def _start_slowly_once():
    """A busy machine cannot be had on demand: the first start says what Ray says there."""
    starts = []

    def slow_once(**settings):
        starts.append(settings["_temp_dir"])
        if len(starts) == 1:
            raise Exception("The current node timed out during startup. This could happen because some of the raylet failed to startup")
        return real(**settings)

    real = ray.init
    ray.init = slow_once
    cluster = Cluster(None, 1.0)
    try:
        assert ray.cluster_resources()["CPU"] >= 1
        assert len(set(starts)) == 2
        assert not Path(starts[0]).exists()
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
            cluster.leave()
            assert other.poll() is None, "it was not Ray's"
    finally:
        cluster.leave()
    assert not Path(starts[1]).exists()


def test_any_other_error_of_its_start_is_raised_at_once(monkeypatch):
    starts = []

    def broken(**settings):
        starts.append(settings["_temp_dir"])
        raise RuntimeError("no space left")

    monkeypatch.setattr(ray, "init", broken)
    with pytest.raises(RuntimeError, match="no space left"):
        Cluster(None, 1.0)
    assert len(starts) == 1
    assert not Path(starts[0]).exists()
