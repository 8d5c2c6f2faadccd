import os

import pytest

from miles.ray.cluster import Cluster
from miles.ray.worker_manager import WorkerManager
from miles.ray.worker_spec import Limit, WorkerSpec

LIMITS = {"busy_here_in_compute": Limit(30.0, "--train-timeout"), "wait": Limit(1.0, "--sample-timeout")}


def plain(name, **kwargs):
    return WorkerSpec(name, "tests.ray.plain_workers.Plain", kwargs, env={"OMP_NUM_THREADS": "1"}, limits=LIMITS)


@pytest.fixture(scope="session")
def local_ray():
    """One local Ray for all tests of this room."""
    cluster = Cluster(None, cpus_needed=2)
    yield cluster
    cluster.leave()


class Lent:
    """A cluster that a manager may not end."""

    def __init__(self, cluster):
        self._cluster = cluster
        self.namespace = f"test-{os.urandom(4).hex()}"

    def env(self):
        return self._cluster.env()

    def leave(self):
        pass


@pytest.fixture
async def ray_manager(local_ray, tmp_path):
    manager = WorkerManager(str(tmp_path / "logs"), shutdown_timeout=5.0, cluster=Lent(local_ray))
    yield manager
    await manager.shutdown()


@pytest.fixture
async def process_manager(tmp_path):
    manager = WorkerManager(str(tmp_path / "logs"), shutdown_timeout=5.0)
    yield manager
    await manager.shutdown()


@pytest.fixture(params=["ray", "in_process"])
def manager(request):
    return request.getfixturevalue("ray_manager" if request.param == "ray" else "process_manager")
