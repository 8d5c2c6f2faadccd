"""Folders of runs that were killed are removed by the next one, and no others."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from miles.ray.temp_folders import TempFolder, remove_stale

MAKE = """
import os, sys
from miles.ray.temp_folders import TempFolder
made = TempFolder(sys.argv[1])
print(made.path, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def killed(tmp_path):
    """The folder of a process that was killed."""
    made = subprocess.run([sys.executable, "-c", MAKE, str(tmp_path)], stdout=subprocess.PIPE, text=True, check=False)
    assert made.returncode == -9
    return Path(made.stdout.strip())


def test_what_a_killed_run_left_is_removed(killed, tmp_path):
    (killed / "session" / "sockets").mkdir(parents=True)
    (tmp_path / "miles-of-somebody").mkdir()
    used = TempFolder(str(tmp_path))
    assert remove_stale(str(tmp_path)) == [str(killed)]
    assert sorted(os.listdir(tmp_path)) == sorted(["miles-of-somebody", Path(used.path).name])
    used.remove()
    assert os.listdir(tmp_path) == ["miles-of-somebody"]


def test_a_folder_that_a_process_still_uses_stays(killed, tmp_path):
    agent = subprocess.Popen([sys.executable, "-c", "input()", f"--session-dir={killed}/session"], stdin=subprocess.PIPE)
    try:
        assert remove_stale(str(tmp_path)) == []
    finally:
        agent.communicate(b"\n")
    assert remove_stale(str(tmp_path)) == [str(killed)]
