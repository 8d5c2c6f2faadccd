"""What holds for all tests."""

import gc

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes depends on who else uses the machine.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

gc.disable()  # what libraries make while they are imported stays: to look through it again and again takes time


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def local_ray():
    """One local Ray for all tests that want Ray in their own process: a process has one at most."""
    from miles.ray.cluster import Cluster

    cluster = Cluster(None, cpus_needed=2)
    yield cluster
    cluster.leave()
