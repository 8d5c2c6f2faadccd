"""A dozen kills at named points; hundreds, and at random moments, are made by benchmarks/resume_chaos.py."""

import random

import pytest

from benchmarks.resume_chaos import Chaos, draw
from miles.fault_tolerance.kill_points import POINTS

TRIALS = {
    "plain": [
        ["taken@1", "before_step@1", "actor_saved@2", "before_complete@3"],
        ["after_complete@1", "before_trained@2", "before_step@2", "bucket_sent@4"],
    ],
    "fully async, on schedule": [["generated@9", "after_publish@1", "before_complete@3"]],
    "publish every 3": [["executor_columns@0", "after_trained@1", "scored@17"]],
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


def test_every_point_is_drawn():
    rng = random.Random(0)
    drawn = {kill.partition("@")[0] for _ in range(300) for kill in draw(rng, list(POINTS), 5.0) if isinstance(kill, str)}
    assert drawn == set(POINTS)
