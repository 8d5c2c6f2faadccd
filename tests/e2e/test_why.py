"""miles why, asked of a living run, of a killed one, and of others that ended."""

import json
import signal

import pytest

from miles.cli.why import main
from miles.tracking import waits

pytestmark = pytest.mark.filterwarnings("default")  # as users run it


def test_a_run_that_waits_for_a_reward_and_is_then_killed(launch, capsys):
    run = launch("stuck", "--in-process", "--reward", "tests.e2e.slow.stuck_reward", "--num-rollout", 4)

    def stuck(run):
        beats = waits.read(run.folder / "logs")
        return "executor" in beats and any("reward" in note for note in beats["executor"].notes) and run.trained(1)

    run.wait_for(stuck)
    assert main([str(run.folder), "--stacks"]) == 0
    said = capsys.readouterr().out
    assert ": lives; 1 rollouts of 4 trained" in said
    assert "driver waits for executor (get, " in said
    assert "which waits for reward 'tests.e2e.slow.stuck_reward' of" in said
    assert "worker executor: get for" in said

    run.process.send_signal(signal.SIGKILL)
    run.end()
    assert main([str(run.folder)]) == 0
    said = capsys.readouterr().out
    assert ": is over; 1 rollouts of 4 trained" in said
    assert "ended without a word: killed" in said
    assert "executor waits for reward 'tests.e2e.slow.stuck_reward'" in said
    assert "unfinished: generate {'rollout_id': 1}" in said
    assert "prompt groups were in flight or waiting" in said
    assert "complete checkpoint" in said


def test_a_run_that_failed_says_with_what(drive, capsys):
    with pytest.raises(Exception, match="no such thing"):
        drive("failed", "--reward", "tests.e2e.slow.broken_reward", "--num-rollout", 2)
    folder = drive.folder / "failed"
    assert json.loads((folder / "end.json").read_text())["error"] == "RewardError"
    assert main([str(folder)]) == 0
    said = capsys.readouterr().out
    assert "ago with RewardError: reward 'tests.e2e.slow.broken_reward' failed" in said
    assert "no such thing" in said
    assert "there is no complete checkpoint in its folder" in said


def test_a_run_that_came_to_its_end(drive, capsys):
    run = drive("done", "--num-rollout", 4)
    assert main([str(run.folder)]) == 0
    said = capsys.readouterr().out
    assert ": is over; 4 rollouts of 4 trained" in said
    assert "it came to its end" in said
    assert "speed: bound by " in said
