"""Spans, their file, and the arithmetic of a step."""

import json
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.tracking import clock, trace_file
from miles.tracking.timeline import KEPT_SPANS, Timeline


def played(generate: float, train: float, publish: float, steps: int = 4, overlap: bool = True) -> Timeline:
    """A run whose every step takes just this long."""
    line, now = Timeline(), 1000.0
    line.add("executor", "generate", now, now + generate, rollout_id=0)
    now += generate
    for rollout in range(steps):
        if overlap and rollout + 1 < steps:
            line.add("executor", "generate", now, now + generate, rollout_id=rollout + 1)
        line.add("actor", "train", now, now + train, rollout_id=rollout)
        now += max(generate, train) if overlap else train
        line.add("driver", "publish", now, now + publish, rollout_id=rollout)
        now += publish
        if not overlap and rollout + 1 < steps:
            line.add("executor", "generate", now, now + generate, rollout_id=rollout + 1)
            now += generate
    return line


def test_full_overlap_is_one():
    metrics = played(3.0, 2.0, 0.5).step_metrics(2)
    assert metrics == pytest.approx(
        {
            "perf/step_seconds": 3.5,
            "perf/generate_seconds": 3.0,
            "perf/train_seconds": 2.0,
            "perf/publish_seconds": 0.5,
            "perf/overlap_efficiency": 1.0,
        }
    )


def test_taking_turns_is_less():
    metrics = played(3.0, 2.0, 0.5, overlap=False).step_metrics(2)
    assert metrics["perf/step_seconds"] == pytest.approx(5.5)
    assert metrics["perf/overlap_efficiency"] == pytest.approx(3.5 / 5.5)


def test_evals_and_saves_are_shown_and_not_blamed():
    line = played(3.0, 2.0, 0.5, steps=2)
    end = 1000 + 3 + 3.5 + 3.5
    line.add("driver", "save", end, end + 1, rollout_id=1)
    line.add("executor", "eval", end + 1, end + 5, rollout_id=1)
    line.add("executor", "generate", end + 5, end + 8, rollout_id=3)
    line.add("actor", "train", end + 5, end + 8, rollout_id=2)
    metrics = line.step_metrics(2)
    assert metrics["perf/step_seconds"] == pytest.approx(8.0)
    assert (metrics["perf/save_seconds"], metrics["perf/eval_seconds"]) == (1.0, 4.0)
    assert metrics["perf/overlap_efficiency"] == pytest.approx(1.0)


@given(
    st.lists(
        st.tuples(st.sampled_from(["generate", "train", "publish", "eval", "save"]), st.floats(0, 20), st.floats(0.01, 5)), max_size=12
    )
)
def test_efficiency_is_a_share(spans):
    """Whatever ran beside whatever."""
    line = Timeline()
    line.add("actor", "train", -1.0, 0.0, rollout_id=0)
    for name, start, length in spans:
        line.add("x", name, start, start + length, rollout_id=1)
    metrics = line.step_metrics(1)
    if metrics:
        assert 0 <= metrics["perf/overlap_efficiency"] <= 1 + 1e-9


def test_ranks_side_by_side_count_once():
    line = Timeline()
    for rank in range(4):
        line.add(f"actor-{rank}", "train", 10.0 + rank / 10, 12.0 + rank / 10, rollout_id=0)
    assert line.step_metrics(0)["perf/train_seconds"] == pytest.approx(2.3)


def test_a_rollout_that_was_not_trained_has_no_step():
    line = Timeline()
    line.add("executor", "generate", 0.0, 1.0, rollout_id=0)
    assert line.step_metrics(0) == {}
    assert line.step_metrics(9) == {}


def test_running_spans_are_what_one_waits_for():
    line = Timeline()
    with line.span("actor", "train", rollout_id=0), line.span("executor", "generate", rollout_id=1):
        assert [(span.worker, span.name) for span in line.running()] == [("actor", "train"), ("executor", "generate")]
    assert line.running() == []


def test_a_span_that_fails_ends_too():
    line = Timeline()
    with pytest.raises(KeyError), line.span("actor", "train", rollout_id=0):
        raise KeyError
    assert line.running() == []


def test_a_clock_that_is_set_back_changes_no_duration(tmp_path, monkeypatch):
    line = Timeline(tmp_path / "timeline.json")
    before = clock.now()
    monkeypatch.setattr(time, "time", lambda: 40.0)
    with line.span("actor", "train", rollout_id=0):
        pass
    assert before <= line.changed <= clock.now()
    monkeypatch.undo()
    line.close()
    (event,) = (event for event in trace_file.read(tmp_path / "timeline.json") if event["ph"] == "X")
    assert 0 <= event["dur"] < 60e6


def test_the_file_is_a_chrome_trace(tmp_path):
    line = Timeline(tmp_path / "timeline.json")
    line.add("actor", "train", 10.0, 12.5, rollout_id=3)
    line.add("executor", "generate", 10.0, 11.0, rollout_id=4)
    unfinished = trace_file.read(tmp_path / "timeline.json")
    line.close()
    line.close()
    events = json.loads((tmp_path / "timeline.json").read_text())
    assert events == unfinished
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["actor", "executor"]
    (train,) = [event for event in events if event["name"] == "train"]
    assert (train["ts"], train["dur"], train["args"]) == (10_000_000, 2_500_000, {"rollout_id": 3})


def test_a_resumed_run_goes_on_in_the_same_file_even_after_a_kill(tmp_path):
    path = tmp_path / "timeline.json"
    killed = Timeline(path)
    killed.add("actor", "train", 10.0, 12.5, rollout_id=0)
    with path.open("a") as file:
        file.write('{"name": "tor')
    line = Timeline(path)
    line.add("actor", "train", 20.0, 22.5, rollout_id=1)
    line.close()
    events = json.loads(path.read_text())
    assert [event["args"]["rollout_id"] for event in events if event["ph"] == "X"] == [0, 1]
    assert len({event["tid"] for event in events}) == 1


def test_an_empty_timeline_is_an_array_too(tmp_path):
    Timeline(tmp_path / "timeline.json").close()
    assert json.loads((tmp_path / "timeline.json").read_text()) == []


def test_a_full_disk_costs_the_file_and_not_the_run(tmp_path, caplog):
    line = Timeline(tmp_path / "timeline.json")
    os.dup2(os.open("/dev/full", os.O_WRONLY), line._file._file)
    line.add("actor", "train", 1.0, 2.0, rollout_id=0)
    line.add("actor", "train", 2.0, 3.0, rollout_id=1)
    line.close()
    assert caplog.text.count("ends here: [Errno 28]") == 1
    assert line.step_metrics(1)["perf/train_seconds"] == 1.0


def test_memory_stays_bounded():
    line = Timeline()
    for rollout in range(2000):
        line.add("actor", "train", rollout, rollout + 1, rollout_id=rollout)
    assert len(line._spans) <= KEPT_SPANS
    assert line.step_metrics(1999)["perf/step_seconds"] == 1.0
