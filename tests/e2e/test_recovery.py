"""Engines that are killed come back with the current weights, and every group is accounted for."""

import re
import socket

import pytest

from miles.tracking import ledger

pytestmark = pytest.mark.filterwarnings("default")  # as users run it


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.case("C79")
@pytest.mark.parametrize(("engines", "moments"), [(1, ["generation"]), (2, ["generation", "pause", "publish"])])
@pytest.mark.slow
def test_an_engine_that_is_killed_comes_back_with_the_weights_of_the_run(launch, engines, moments):
    rollouts = len(moments) + 2
    healing = ("--api-server-port", free_port(), "--mini-ft-controller", "--mini-ft-poll-interval", 0.2, "--mini-ft-resume-delay", 0)
    calm = ("--mini-ft-cooldown", 0, "--health-interval", 0.3, "--no-save-on-signal", "--eval-interval", 100)
    run = launch(
        "killed",
        "--fully-async",
        "--num-rollout",
        rollouts,
        "--num-engines",
        engines,
        *healing,
        *calm,
        driver="tests/e2e/killing_driver.py",
    ).end()
    assert run.code == 0, run.err
    assert re.findall(r"^killed engine-\d in (\w+)", run.err, re.M) == moments
    assert re.findall(r"^back: engine-\d, current: (\w+)", run.err, re.M) == ["True"] * len(moments)
    assert [rollout for rollout, _ in run.series("train/loss")] == list(range(rollouts))
    books = ledger.balance(ledger.read(run.folder / "ledger.jsonl"))
    assert books.holds, books.faults
    assert not books.open
    assert books.ended["trained"] == rollouts * 4
    assert min(lag for _, lag in run.series("rollout/weight_lag_max")) >= 0
    assert max(lag for _, lag in run.series("rollout/weight_lag_max")) <= 2, "nothing was written with the checkpoint's own weights"
