"""A resumed run goes on as if it had never stopped."""

import json
import time

import pytest

from miles.ray.guard import EndOfRun
from miles.tracking import ledger

pytestmark = pytest.mark.filterwarnings("default")  # as users run it


@pytest.mark.case("C61")
@pytest.mark.case("C63")
def test_a_resumed_run_equals_an_uninterrupted_one(drive):
    whole = drive("whole", "--num-rollout", 6, "--save-interval", 2)
    stopped = drive("stopped", "--num-rollout", 6, "--save-interval", 2, "--debug-exit-after-rollout", 4)
    assert [rollout for rollout, _ in stopped.series("train/loss")] == [0, 1, 2, 3]
    resumed = drive("stopped", "--num-rollout", 6, "--save-interval", 2, "--load", stopped.folder / "checkpoints")
    assert [rollout for rollout, _ in resumed.series("train/loss")] == [0, 1, 2, 3, 4, 5]
    assert [lag for _, lag in resumed.series("train/weight_lag_max")] == [0, 1, 1, 1, 1, 1]
    assert resumed.values() == whole.values()
    assert resumed.histories() == whole.histories()
    assert resumed.weights() == whole.weights()


@pytest.mark.case("C63")
def test_fully_async_trains_every_group_once_across_a_resume(drive):
    first = drive("fully", "--fully-async", "--num-rollout", 6, "--save-interval", 3, "--debug-exit-after-rollout", 3)
    run = drive("fully", "--fully-async", "--num-rollout", 6, "--save-interval", 3, "--load", first.folder / "checkpoints")
    groups = [group for rollout in run.trained_groups().values() for group in rollout]
    assert len(groups) == 24
    assert sorted(groups) == sorted(set(groups))
    assert max(groups) < 24 + 8


@pytest.mark.case("C69")
@pytest.mark.parametrize("flags", [(), ("--fully-async",)])
def test_engines_have_the_restored_weights_before_they_are_asked(drive, flags):
    """No deadlock of engines that wait for weights and a trainer that waits for rollouts; nothing is written by the base checkpoint."""
    first = drive("first", "--num-rollout", 6, "--save-interval", 4, "--debug-exit-after-rollout", 4, *flags)
    resumed_at = time.time()
    run = drive("first", "--num-rollout", 6, "--save-interval", 4, "--load", first.folder / "checkpoints", *flags)
    written = [line for line in ledger.read(run.folder / "ledger.jsonl") if line["event"] == "finished" and line["time"] >= resumed_at]
    assert written
    assert min(line["version"] for line in written) == 5  # version 1 is the base checkpoint's, 5 that of four trained rollouts
    assert [rollout for rollout, _ in run.series("train/loss")] == [0, 1, 2, 3, 4, 5]


@pytest.mark.case("C67")
def test_nothing_left_to_do_is_said(drive):
    done = drive("done", "--save-interval", 4)
    before = done.lines
    with pytest.raises((EndOfRun, SystemExit)):
        drive("again", "--num-rollout", 4, "--load", done.folder / "checkpoints")
    with pytest.raises((EndOfRun, SystemExit)):
        drive("again", "--num-rollout", 3, "--load", done.folder / "checkpoints")
    more = drive("more", "--num-rollout", 6, "--load", done.folder / "checkpoints")
    assert [rollout for rollout, _ in more.series("train/loss")] == [4, 5]
    assert done.lines == before


@pytest.mark.parametrize("flags", [(), ("--fully-async",)])
def test_a_run_that_ended_before_its_last_evaluation_makes_up_for_it(drive, flags):
    """It is saved before it is evaluated, and may be killed between the two."""
    flags = ("--num-rollout", 2, "--save-interval", 2, "--eval-interval", 1, *flags)
    run = drive("run", *flags)
    whole, books, file = run.values(), run.histories(), run.folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    kept = [line for line in lines if "eval/" not in line or json.loads(line)["rollout_id"] != 1]
    assert len(kept) == len(lines) - 1
    file.write_text("".join(kept))
    again = drive("run", *flags)
    assert again.values() == whole
    assert again.histories() == books
    with pytest.raises(SystemExit):
        drive("run", "--resume", run.folder, *flags)


@pytest.mark.case("C65")
def test_resumed_at_the_end_of_an_epoch(drive):
    flags = ("--num-epoch", 3, "--rollout-batch-size", 16, "--n-samples-per-prompt", 2, "--save-interval", 100, "--num-rollout", 9)
    first = drive("epoch", *flags, "--debug-exit-after-rollout", 3, "--save-interval", 3)
    run = drive("epoch", *flags, "--load", first.folder / "checkpoints")
    assert [rollout for rollout, _ in run.series("train/loss")] == list(range(9))
    counts = [group for rollout in run.trained_groups().values() for group in rollout]
    assert sorted(counts) == list(range(144))


def test_a_start_id_overrides_the_restored_one(drive):
    first = drive("first", "--num-rollout", 4, "--save-interval", 2)
    run = drive("again", "--num-rollout", 4, "--start-rollout-id", 2, "--load", first.folder / "checkpoints" / "rollout_000001")
    assert [rollout for rollout, _ in run.series("train/loss")] == [2, 3]


def test_an_incomplete_checkpoint_does_not_count(drive):
    first = drive("first", "--num-rollout", 4, "--save-interval", 2)
    (first.folder / "checkpoints" / "rollout_000003" / "COMPLETE").unlink()
    run = drive("again", "--num-rollout", 4, "--load", first.folder / "checkpoints")
    assert [rollout for rollout, _ in run.series("train/loss")] == [2, 3]
