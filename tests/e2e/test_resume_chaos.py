"""A dozen kills at named points, and of everything under Ray; hundreds, and at random moments, are made by benchmarks/resume_chaos.py."""

import random

import pytest
from resume_chaos import DRIVER, MODES, Chaos, Strike, draw

from miles.fault_tolerance.kill_points import POINTS

TRIALS = {
    "plain": [
        ["taken@1", "before_step@1", "actor_saved@2", "before_complete@3"],
        ["before_trained@2", "bucket_sent@4"],
    ],
    "fully async, on schedule": [["generated@9", "after_publish@1", "before_complete@3"]],
    "publish every 3": [["executor_columns@0", "after_trained@1"]],
    "synchronous": [["after_complete@1"]],
    "fully async": [["scored@40", "before_step@3"]],
}


@pytest.fixture(scope="module")
def chaos(tmp_path_factory):
    made = Chaos(tmp_path_factory.mktemp("chaos"))
    yield made
    made.nursery.close()


@pytest.mark.slow
@pytest.mark.parametrize("mode", TRIALS)
def test_a_killed_run_ends_like_one_that_was_not(chaos, mode):
    for number, kills in enumerate(TRIALS[mode]):
        trial = chaos.trial(f"{mode.replace(' ', '-').replace(',', '')}-{number}", mode, kills)
        assert trial.wrong == []
        assert trial.kills == kills, "every point was reached"
        # A save that was being written at the kill does not count, and there is never more than one.
        assert trial.repeated <= 2 * len(kills), "a kill costs two rollouts at most"


@pytest.mark.slow
def test_a_killed_driver_takes_everything_along_and_the_same_command_goes_on(chaos):
    """Under Ray, to the numbers of one process; the trial fails for whatever process is left."""
    chaos.whole["ray, plain"] = chaos.reference("plain")
    kill = Strike(DRIVER, 1, 0.0)
    trial = chaos.trial("ray", "ray, plain", [kill])
    assert trial.wrong == []
    assert trial.kills == [str(kill)]


def test_every_point_and_every_victim_is_drawn():
    rng = random.Random(0)
    workers = MODES["ray, two trainers"].workers
    drawn = [kill for _ in range(300) for kill in draw(rng, list(POINTS), 5.0, workers)]
    assert {kill.partition("@")[0] for kill in drawn if isinstance(kill, str)} == set(POINTS)
    assert {kill.victim for kill in drawn if isinstance(kill, Strike)} == {"driver", "all", "executor", "actor-0", "actor-1", "engine-0"}
