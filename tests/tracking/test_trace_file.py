"""timeline.json is whole at every moment and keeps the rules of its format."""

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from miles.tracking.critical_path import Arrival, Span
from miles.tracking.timeline import MOST_ARROWS, Timeline
from miles.types import GroupTimes
from tests.tracking.simulated_run import Simulated
from tests.tracking.trace_rules import check


def write(path: Path, run: Simulated) -> Timeline:
    """A simulated run as its driver would have told it."""
    line = Timeline(path)
    for span in sorted(run.spans, key=lambda span: span.end):
        line.add(span.worker, span.name, span.start, span.end, **span.args)
        if span.name == "generate":
            line.arrived(span.rollout_id, run.arrivals[span.rollout_id])
        if span.name == "publish":
            line.published(span, ["engine-0", "engine-1"])
    return line


@settings(max_examples=25)
@given(st.tuples(*[st.floats(0.1, 5)] * 2), st.floats(0, 2), st.floats(0.1, 1), st.sampled_from(["plain", "in_turn", "fully"]))
def test_a_run_keeps_the_rules(tmp_path_factory, engine_and_trainer, score, publish, kind):
    run = Simulated(*engine_and_trainer, score=score, publish=publish)
    run.fully(4, places=8, ahead=12) if kind == "fully" else run.plain(4) if kind == "plain" else run.in_turn(4)
    path = tmp_path_factory.mktemp("trace") / "timeline.json"
    write(path, run).close()
    events = check(path.read_text())
    rows = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"actor", "executor", "engine-0", "engine-1"} <= rows
    arrows = [event["name"] for event in events if event["ph"] == "s"]
    trained = [span for span in run.spans if span.name == "train"]
    assert arrows.count("group") == len(trained) * run.batch
    assert arrows.count("publish") == 2 * sum(span.name == "publish" for span in run.spans)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(["actor", "executor"]), st.integers(0, 40), st.integers(1, 15)), max_size=20))
def test_slices_that_would_cut_through_each_other_get_rows_of_their_own(tmp_path_factory, spans):
    path = tmp_path_factory.mktemp("trace") / "timeline.json"
    line = Timeline(path)
    for worker, start, length in spans:
        line.add(worker, "x", float(start), float(start + length))
        check(path.read_text())


def test_what_is_running_begins_and_does_not_end(tmp_path):
    path = tmp_path / "timeline.json"
    line = Timeline(path)
    assert check(path.read_text()) == []
    with line.span("actor", "train", rollout_id=3):
        with line.span("executor", "generate", rollout_id=4):
            begun = [event for event in check(path.read_text()) if event["ph"] == "B"]
            assert [(event["name"], event["args"]) for event in begun] == [("train", {"rollout_id": 3}), ("generate", {"rollout_id": 4})]
        (open_slice,) = [event for event in check(path.read_text()) if event["ph"] == "B"]
        assert open_slice["name"] == "train"
    assert [event["ph"] for event in check(path.read_text())] == ["M", "M", "X", "X"]


def test_many_groups_have_a_few_arrows(tmp_path):
    line = Timeline(tmp_path / "timeline.json")
    line.add("executor", "generate", 0.0, 3.0, rollout_id=0)
    line.arrived(0, Arrival([GroupTimes(place / 1000, 1 + place / 1000, 2.5, 0) for place in range(1000)], 2.5))
    line.add("actor", "train", 3.0, 4.0, rollout_id=0)
    events = check((tmp_path / "timeline.json").read_text())
    assert MOST_ARROWS / 2 <= len([event for event in events if event["ph"] == "s"]) <= MOST_ARROWS


KILLED = """
import os, signal, sys
from miles.tracking.timeline import Timeline
line = Timeline(sys.argv[1])
for rollout in range(3):
    with line.span("actor", "train", rollout_id=rollout):
        pass
with line.span("actor", "publish", rollout_id=2), line.span("executor", "generate", rollout_id=3):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_leaves_a_whole_file_and_a_resumed_one_goes_on_in_it(tmp_path):
    path = tmp_path / "timeline.json"
    code = subprocess.run([sys.executable, "-c", KILLED, path], env=os.environ, timeout=60, check=False).returncode
    assert code == -signal.SIGKILL
    events = check(path.read_text())
    assert [event["name"] for event in events if event["ph"] == "B"] == ["publish", "generate"]
    line = Timeline(path)
    line.add("actor", "train", 5e9, 5e9 + 1, rollout_id=3)
    line.close()
    events = check(path.read_text())
    assert [event["args"].get("cut_off") for event in events if event["ph"] == "X"] == [None, None, None, True, True, None]


def test_rounding_makes_no_overlap(tmp_path):
    line = Timeline(tmp_path / "timeline.json")
    moments = [1.7e9 + place * 3.3e-7 for place in range(40)]
    for start, end in itertools.pairwise(moments):
        line.add("actor", "train", start, end)
    events = check((tmp_path / "timeline.json").read_text())
    assert len([event for event in events if event["ph"] == "M"]) == 1


def test_a_publish_within_a_generation_is_drawn_at_the_engine(tmp_path):
    line = Timeline(tmp_path / "timeline.json")
    line.add("actor", "publish", 1.0, 2.0, rollout_id=0)
    line.published(Span("actor", "publish", 1.0, 2.0, {"rollout_id": 0}), ["engine-0"])
    line.add("executor", "generate", 0.0, 4.0, rollout_id=1)
    line.arrived(1, Arrival([GroupTimes(0.0, 3.0, 3.5, 0)], 3.5))
    events = check((tmp_path / "timeline.json").read_text())
    (row,) = [event["tid"] for event in events if event["ph"] == "M" and event["args"]["name"] == "engine-0"]
    drawn = [(event["name"], event["ts"], event["ts"] + event["dur"]) for event in events if event["ph"] == "X" and event["tid"] == row]
    assert sorted(drawn, key=lambda slice: slice[1]) == [
        ("generate", 0, 1_000_000),
        ("load weights", 1_000_000, 2_000_000),
        ("generate", 2_000_000, 3_000_000),
    ]
    assert json.loads((tmp_path / "timeline.json").read_text()) == events
