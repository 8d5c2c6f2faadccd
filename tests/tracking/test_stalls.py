"""A run that stalls says what it waits for, and where."""

import queue
import threading
import time

import pytest

from miles.tracking import tracking
from miles.tracking.stalls import StallWatch, driver_stacks
from miles.tracking.timeline import Timeline


class Clock:
    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_it_speaks_up_once_per_timeout_and_names_what_runs(clock):
    line = Timeline()
    watch = StallWatch(line, 100.0, clock)
    watch.who_waits = lambda: "engine-0: in decode"
    with line.span("actor", "train", rollout_id=3):
        assert watch.look() is None
        clock.ahead = 101.0
        said = watch.look()
        assert "no progress for 101 s" in said
        assert "actor: train {'rollout_id': 3} for 101 s" in said
        assert "engine-0: in decode" in said
        assert watch.look() is None
        clock.ahead = 202.0
        assert "no progress for 202 s" in watch.look()


def test_progress_keeps_it_silent(clock):
    line = Timeline()
    watch = StallWatch(line, 100.0, clock)
    clock.ahead = 99.0
    assert watch.look() is None
    line.changed = clock()
    clock.ahead = 198.0
    assert watch.look() is None
    clock.ahead = 200.0
    assert watch.look() is not None


def test_workers_that_do_not_answer_are_part_of_the_report(clock):
    watch = StallWatch(Timeline(), 1.0, clock)

    def silent() -> str:
        raise TimeoutError("no answer")

    watch.who_waits = silent
    clock.ahead = 2.0
    assert "did not tell: TimeoutError: no answer" in watch.look()


def test_a_run_watches_itself(make):
    tracking.init(make(stall_timeout=0.02))
    told = threading.Event()

    def stacks() -> str:
        told.set()
        return "stacks"

    tracking.set_who_waits(stacks)
    assert told.wait(20)


def test_the_drivers_stacks_name_where_each_thread_is():
    asked = queue.Queue()
    asker = threading.Thread(target=lambda: asked.put(driver_stacks()))
    asker.start()
    said = asked.get(timeout=20)
    assert "thread MainThread" in said
    assert "test_the_drivers_stacks_name_where_each_thread_is" in said
