"""The model of a step against runs of known parameters: it must find them, and foretell what a change gives."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.tracking.bounds import Bounds, StepModel, diagnose
from tests.tracking.simulated_run import Simulated

STEPS = 10
FULL = "shorter answers (--max-response-length), or one more engine on a host with more than the {} cores of this one,"
seconds = st.floats(0.05, 5)


def play(run, mode="plain", **settings):
    return run.fully(STEPS, places=8, ahead=8 * run.batch, **settings) if mode == "fully" else getattr(run, mode)(STEPS)


def learnt(run, make, mode="plain", cores=64, **changes):
    bounds = Bounds(
        make(rollout_batch_size=run.batch, fully_async=mode == "fully", max_weight_staleness=4, num_engines=run.engines, **changes), cores
    )
    trained = sorted(span.rollout_id for span in run.spans if span.name == "train")
    for rollout in trained[-STEPS:]:
        bounds.note(run.spans, run.arrivals, rollout)
    return bounds


@settings(max_examples=40)
@given(write=seconds, train=seconds, score=st.floats(0, 3), publish=st.floats(0, 1), mode=st.sampled_from(["plain", "in_turn"]))
def test_it_knows_a_run_and_foretells_another_engine(make_settings, mode, **took):
    parameters = took | {"pack": 0.05}
    run = Simulated(**parameters)
    step = play(run, mode)
    model = learnt(run, make_settings, mode).diagnosis().model
    assert model.mode == mode.replace("_", " ")
    assert model.seconds == pytest.approx(step, rel=0.02)
    assert (model.generation, model.training) == pytest.approx((took["write"], took["train"]), rel=1e-3)
    faster = play(Simulated(**parameters, engines=2), mode)
    assert replace(model, generation=model.generation / 2).seconds == pytest.approx(faster, rel=0.02)


@pytest.mark.parametrize(("write", "train"), [(8.0, 1.0), (3.0, 2.0), (1.0, 4.0)])
def test_it_knows_a_producer_that_never_stops(make_settings, write, train):
    run = Simulated(write=write, train=train, score=0.2, publish=0.1)
    took = play(run, "fully")
    model = learnt(run, make_settings, "fully").diagnosis().model
    assert model.seconds == pytest.approx(took, rel=0.1)
    assert model.bound == ("generation" if write > train else "training")


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        (Simulated(write=4.6, train=2.0), "bound by generation: 2.3x training; one more engine would give up to 2.0x"),
        (
            Simulated(write=1.0, train=3.0, score=0.5),
            "bound by training: 2.0x generation and reward; one more trainer would give up to 2.0x",
        ),
        (Simulated(write=1.0, train=2.0, score=4.0), "bound by reward: 2.0x training; --fully-async would give up to 2.5x"),
        (
            Simulated(write=1.0, train=1.1, publish=3.0),
            "bound by publish: 73% of a step; --update-weights-interval 2 would give up to 1.6x",
        ),
        (Simulated(write=2.0, train=2.0, engines=1), "bound by generation: 1.0x training; no single change gives much"),
        # less than training, and more than it together with the rewards
        (Simulated(write=1.8, train=2.0, score=1.0), "bound by generation: 64% of a step; one more engine would give up to 1.4x"),
    ],
)
def test_what_it_says(make_settings, run, sentence):
    play(run)
    assert learnt(run, make_settings).diagnosis().sentence == sentence


@pytest.mark.parametrize(
    ("settings", "cores", "needs"),
    [
        ({}, 3, "one more engine"),
        ({}, 2, FULL.format(2)),
        ({"engine_threads": 2}, 4, FULL.format(4)),
        ({"device": "cuda"}, 64, "one more engine on a GPU of its own"),
        ({"ray_address": "10.0.0.1:6379"}, 2, "one more engine"),
    ],
)
def test_one_more_engine_is_said_to_need_what_the_run_has_not(make_settings, settings, cores, needs):
    run = Simulated(write=4.6, train=2.0)
    play(run)
    sentence = learnt(run, make_settings, cores=cores, **settings).diagnosis().sentence
    assert sentence == f"bound by generation: 2.3x training; {needs} would give up to 2.0x"


def test_taking_turns_is_told_of_the_asynchronous_driver(make_settings):
    run = Simulated(write=2.0, train=2.0)
    play(run, "in_turn")
    assert (
        learnt(run, make_settings, "in_turn").diagnosis().sentence
        == "bound by generation: 1.0x training; train_async.py would give up to 2.0x"
    )


def test_too_few_steps_say_nothing(make_settings):
    run = Simulated(write=2.0, train=2.0)
    run.plain(2)
    assert learnt(run, make_settings).diagnosis() is None


def test_few_or_very_short_steps_are_said_to_give_a_guess(make_settings):
    for run, steps, guess in ((Simulated(write=2.0, train=2.0), 6, " s)"), (Simulated(write=0.002, train=0.001), 10, " s)")):
        run.plain(steps)
        sentence = learnt(run, make_settings).diagnosis().sentence
        assert "(a guess: " in sentence
        assert sentence.endswith(guess)


def test_nothing_divides_by_nothing(make_settings):
    for mode in ("in turn", "plain", "fully"):
        assert diagnose(StepModel(mode), make_settings(), 2).speedup >= 1.0
