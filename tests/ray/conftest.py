import asyncio
import os
from types import SimpleNamespace

import pytest

from miles.ray.worker_manager import WorkerManager
from miles.ray.worker_spec import Limit, WorkerSpec

LIMITS = {"busy_here_in_compute": Limit(30.0, "--train-timeout"), "wait": Limit(0.5, "--sample-timeout")}


def plain(name, **kwargs):
    return WorkerSpec(name, "tests.ray.plain_workers.Plain", kwargs, env={"OMP_NUM_THREADS": "1"}, limits=LIMITS)


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


def lend_pair(manager):
    """Two workers for all tests that leave them as they are: starting a process takes longer than most tests."""
    loop = asyncio.new_event_loop()
    one, two = loop.run_until_complete(manager.start_all([plain(name, store=manager.store) for name in ("one", "two")]))
    yield SimpleNamespace(manager=manager, one=one, two=two)
    loop.run_until_complete(manager.shutdown())
    loop.close()


@pytest.fixture(scope="session")
def ray_pair(local_ray, tmp_path_factory):
    yield from lend_pair(WorkerManager(str(tmp_path_factory.mktemp("logs")), shutdown_timeout=5.0, cluster=Lent(local_ray)))


@pytest.fixture(scope="session")
def process_pair(tmp_path_factory):
    yield from lend_pair(WorkerManager(str(tmp_path_factory.mktemp("logs")), shutdown_timeout=5.0))


@pytest.fixture(params=["ray", "in_process"])
def pair(request):
    return request.getfixturevalue("ray_pair" if request.param == "ray" else "process_pair")


@pytest.fixture(params=["ray", "in_process"])
def manager(request):
    return request.getfixturevalue("ray_manager" if request.param == "ray" else "process_manager")
