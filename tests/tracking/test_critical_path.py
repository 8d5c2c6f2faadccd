"""The chain of work that each step waited for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.tracking.critical_path import Arrival, Span, critical_path
from miles.types import GroupTimes
from tests.tracking.simulated_run import Simulated

seconds = st.floats(0.01, 9)


def parts(run: Simulated, rollout: int) -> dict[str, float]:
    return {part: value for part, value in critical_path(run.spans, run.arrivals, rollout).items() if value > 1e-5}


def test_a_slow_engine_is_the_whole_step_but_for_the_publish():
    run = Simulated(write=3.0, score=0.5, pack=0.25, train=2.0, publish=0.4)
    run.plain(5)
    assert parts(run, 3) == pytest.approx({"generation": 3.0, "reward": 0.5, "data": 0.25, "publish": 0.4})


def test_a_slow_trainer_is_the_whole_step_but_for_publish_and_eval():
    run = Simulated(write=1.0, score=0.5, train=2.0, publish=0.4, eval=1.5, eval_every=2)
    run.plain(5)
    assert parts(run, 3) == pytest.approx({"training": 2.0, "publish": 0.4})
    assert parts(run, 4) == pytest.approx({"training": 2.0, "publish": 0.4, "eval": 1.5})


def test_in_turn_everything_is_on_the_path():
    run = Simulated(write=3.0, score=0.5, train=2.0, publish=0.4)
    run.in_turn(4)
    assert parts(run, 2) == pytest.approx({"generation": 3.0, "reward": 0.5, "training": 2.0, "publish": 0.4})


def test_the_first_step_is_its_batch():
    run = Simulated(write=3.0, score=0.5, train=2.0)
    run.plain(2)
    assert parts(run, 0) == pytest.approx({"generation": 3.0, "reward": 0.5})


@given(write=seconds, score=seconds, pack=seconds, train=seconds, publish=seconds, kind=st.sampled_from(["plain", "in_turn", "fully"]))
def test_the_parts_add_up_to_the_time_between_two_trainings(kind, **took):
    run = Simulated(**took)
    run.fully(4, places=8, ahead=12) if kind == "fully" else run.plain(6) if kind == "plain" else run.in_turn(6)
    begun = {span.rollout_id: span.start for span in run.spans if span.name == "train"}
    for rollout in range(1, 5):
        found = critical_path(run.spans, run.arrivals, rollout)
        assert min(found.values()) >= -1e-5
        assert sum(found.values()) == pytest.approx(begun[rollout] - begun[rollout - 1], abs=1e-4)
        assert found["other"] == pytest.approx(0, abs=1e-4)


def test_a_producer_that_never_stops_is_blamed_for_what_the_trainer_waits():
    run = Simulated(write=6.0, train=1.0)
    run.fully(6, places=4, ahead=8)
    assert parts(run, 6) == pytest.approx({"generation": 6.0}, rel=0.05)
    run = Simulated(write=1.0, train=4.0, publish=0.5)
    run.fully(6, places=4, ahead=8)
    assert parts(run, 6) == pytest.approx({"training": 4.0, "publish": 0.5}, rel=0.01)


def test_a_batch_that_waits_for_its_turn_is_in_the_queue():
    spans = [Span("actor", "train", 0, 1, {"rollout_id": 0}), Span("executor", "generate", 1, 4, {"rollout_id": 1})]
    spans.append(Span("actor", "train", 4, 5, {"rollout_id": 1}))
    path = critical_path(spans, {1: Arrival([GroupTimes(-2, -1, -0.5, 0)], ready=4)}, 1)
    assert (path["queue"], path["training"]) == (3, 1)


def test_evaluations_elsewhere_are_nobodys_wait():
    run = Simulated(write=1.0, train=2.0)
    run.plain(4)
    end = next(span for span in run.spans if span.name == "train" and span.rollout_id == 1).end
    run.spans.append(Span("executor", "eval", end - 7, end, {"rollout_id": 0, "background": True}))
    assert parts(run, 2) == pytest.approx({"training": 2.0})


def test_what_is_not_known_is_not_said():
    run = Simulated(write=1.0, train=2.0)
    run.plain(3)
    assert critical_path(run.spans, run.arrivals, 7) == {}
    assert critical_path(run.spans, {}, 1) == {}
