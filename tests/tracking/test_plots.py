"""Pictures are drawn of any run, long, short, or hardly begun."""

import pytest
from matplotlib.image import imread

from miles.config import metrics_file
from miles.tracking import history, tracking
from miles.tracking.plots import SHOWN_STEPS, plot_run, smooth, window


def play(args, rollouts: int, evals: bool = True, spans: bool = True) -> None:
    tracking.init(args)
    now = 1000.0
    for rollout in range(rollouts):
        tracking.log({"rollout/reward": 0.1 * rollout, "train/weight_lag_max": 1, "train/weight_lag": 0.5}, rollout)
        if evals:
            tracking.log({"eval/a/reward": 0.5, "eval/b/reward": 2.0}, rollout)
        if spans:
            tracking.timeline().add("executor", "generate", now, now + 2, rollout_id=rollout + 1)
            tracking.timeline().add("actor", "train", now, now + 1.5, rollout_id=rollout)
            now += 2
    tracking.finish()


@pytest.mark.parametrize(("rollouts", "evals", "spans"), [(1, True, True), (20, True, True), (3, False, False)])
def test_a_run_becomes_a_picture(make, rollouts, evals, spans):
    args = make()
    play(args, rollouts, evals, spans)
    out = plot_run(args.run_dir)
    assert out.name == "plot.png"
    picture = imread(out)
    assert picture.shape[1] > 1000
    assert picture[..., :3].std() > 0.05


def test_metrics_without_a_reward_are_drawn_too(make, tmp_path):
    args = make()
    tracking.init(args)
    tracking.log({"train/loss": float("nan"), "rollout/reward": None}, 0)
    tracking.finish()
    assert plot_run(args.run_dir, tmp_path / "x.png").exists()


def test_a_run_without_metrics_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no metrics yet"):
        plot_run(tmp_path)


def test_the_average_follows_a_constant_exactly():
    assert smooth([2.0] * 5) == pytest.approx([2.0] * 5)
    assert smooth([]) == []


def test_the_timeline_shows_a_few_steps_from_the_middle():
    spans = [{"name": "train", "ts": 10.0 * n, "dur": 9.0, "args": {"rollout_id": n}} for n in range(20)]
    start, end, said = window(spans)
    assert said == "rollouts 7 to 12"
    assert (start, end) == (70.0, 129.0)
    assert window(spans[:SHOWN_STEPS])[2] == "the whole run"


def test_history_reads_what_is_there(make):
    args = make()
    play(args, 3)
    lines = metrics_file.read(args.run_dir)
    rows = history.by_rollout(lines)
    assert list(rows) == [0, 1, 2]
    assert rows[2]["eval/a/reward"] == 0.5
    assert history.latest(lines)["rollout/reward"] == pytest.approx(0.2)
    assert "eval/b/reward" in history.names(lines)
    assert metrics_file.read(args.run_root) == []
