"""What descends from a run's Ray is known, and ended once the driver is gone; nothing else is."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys

import psutil
import pytest

from miles.ray import warden


@pytest.fixture
def services(tmp_path):
    """A process of Ray's by its name, with a child; and another one beside them."""
    raylet = shutil.copy(shutil.which("sh"), tmp_path / "raylet")
    started = [
        subprocess.Popen([raylet, "-c", "sleep 1000; true"], start_new_session=True),
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True),
    ]
    yield started
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def pids(known):
    return {process.pid for process in known}


def when_it_has_a_child(service):
    for _ in range(100_000):
        if children := psutil.Process(service.pid).children():
            return children[0]
    raise AssertionError("it started nothing")


def test_what_a_killed_driver_leaves_is_ended_and_removed(services, tmp_path, monkeypatch):
    service, other = services
    child = when_it_has_a_child(service)
    found = warden.family(os.getpid(), set())  # with the Ray of tests before this one
    known = {process for process in found if process.pid in {service.pid, child.pid}}
    assert pids(known) == {service.pid, child.pid}
    assert other.pid not in pids(found)
    service.kill()
    service.wait()
    assert pids(warden.family(warden.NOBODY, known)) == {child.pid}, "it lives on without its parent"

    folder = tmp_path / "ray"
    folder.mkdir()
    monkeypatch.setattr(warden, "GRACE", 0.0)
    warden.clean_up(str(folder), known)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert other.poll() is None
    assert not folder.exists()


def test_another_process_of_the_same_number_is_not_ours(services):
    service, _ = services
    assert warden.family(warden.NOBODY, {warden.Known(service.pid, "1")}) == set()
