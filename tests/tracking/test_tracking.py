"""metrics.jsonl and the life of tracking."""

import json
import math
from pathlib import Path

import pytest
import torch

from miles.config import metrics_file
from miles.tracking import history, tracking


def lines(args) -> list[dict]:
    return [json.loads(line) for line in (Path(args.run_dir) / "metrics.jsonl").read_text().splitlines()]


def test_a_line_is_there_as_soon_as_it_is_logged(make):
    args = make()
    tracking.init(args)
    tracking.log({"rollout/reward": 0.5}, 0)
    (line,) = lines(args)
    assert line["rollout/reward"] == 0.5
    assert set(line) == {"rollout_id", "step", "time", "rollout/reward"}


@pytest.mark.case("C93")
def test_three_calls_of_one_step_share_it(make):
    args = make()
    tracking.init(args)
    for name in ("a", "b", "c"):
        tracking.log({name: 1}, 3)
    assert {(line["rollout_id"], line["step"]) for line in lines(args)} == {(3, 4)}


def test_the_step_counts_optimizer_steps(make):
    args = make(global_batch_size=16)  # 4 steps a rollout
    tracking.init(args)
    tracking.log({"rollout/reward": 1}, 0)
    tracking.log({"train/loss": 1}, 0, 2)
    tracking.log({"eval/a/reward": 1}, 0, 0)
    assert [line["step"] for line in lines(args)] == [4, 2, 0]


@pytest.mark.case("C93")
def test_odd_values_are_shown_as_such(make):
    args = make()
    tracking.init(args)
    tensor = torch.tensor(2.5, requires_grad=True).detach()
    tracking.log({"nan": math.nan, "inf": -math.inf, "none": None, "tensor": tensor, "array": torch.tensor([3]), "many": torch.ones(2)}, 0)
    (line,) = lines(args)
    assert (line["nan"], line["inf"], line["none"], line["tensor"], line["array"]) == ("NaN", "-Infinity", None, 2.5, 3.0)
    assert line["many"] == "tensor([1., 1.])"
    (back,) = metrics_file.read(args.run_dir)
    assert math.isnan(back["nan"])
    assert back["inf"] == -math.inf


@pytest.mark.case("C75")
def test_a_late_evaluation_stands_under_its_own_rollout_and_disturbs_nothing(make):
    args = make()
    tracking.init(args)
    for rollout in range(4, 8):
        tracking.log({"train/loss": float(rollout)}, rollout)
    tracking.log({"eval/held_out/reward": 0.5}, 4)
    tracking.log({"train/loss": 8.0}, 8)
    read = metrics_file.read(args.run_dir)
    assert history.series(read, "eval/held_out/reward") == ([4], [0.5])
    assert history.series(read, "train/loss") == ([4, 5, 6, 7, 8], [4.0, 5.0, 6.0, 7.0, 8.0])


def test_without_a_run_nothing_happens():
    tracking.log({"a": 1}, 0)
    tracking.finish()
    assert tracking.folder() is None
    assert tracking.latest() == {}
    with tracking.timeline().span("driver", "train", rollout_id=0):
        pass


def test_finish_is_idempotent_and_a_second_run_starts_anew(make):
    for name in ("one", "two"):
        args = make(name=name)
        tracking.init(args)
        tracking.log({"a": 1}, 0)
        tracking.finish()
        tracking.finish()
        tracking.log({"late": 1}, 1)
        assert len(lines(args)) == 1


def test_the_latest_values_are_at_hand(make):
    tracking.init(make())
    tracking.log({"a": 1, "b": None}, 0)
    tracking.log({"a": 2}, 1)
    assert tracking.latest() == {"a": 2.0, "rollout_id": 1, "step": 2}


def test_probable_mistakes_are_warned_of_in_the_log(make):
    args = make(offload_train=True)
    tracking.init(args)
    assert "--offload-train" in (Path(args.run_dir) / "logs" / "driver.log").read_text()


def test_what_is_told_of_a_rollout_comes_after_its_own_line(make, capsys):
    args = make(num_rollout=2, console="plain")
    tracking.init(args)
    with tracking.timeline().span("actor", "train", rollout_id=0):
        tracking.log({"rollout/reward": 0.25}, 0)
    tracking.tell_after(0, "rollout 0 is saved")
    assert "is saved" not in capsys.readouterr().err
    tracking.step_done(0)
    tracking.tell_after(0, "and told at once")
    said = capsys.readouterr().err
    assert said.index("rollout 0 (1/2)") < said.index("rollout 0 is saved") < said.index("and told at once")
    tracking.tell_after(1, "rollout 1 is saved")
    tracking.finish()
    assert "rollout 1 is saved" in capsys.readouterr().err


def test_a_rollout_without_any_reward_is_told_once(make, caplog):
    tracking.init(make(reward="math"))
    tracking.log({"rollout/unscored": 2.0, "rollout/reward": 0.5}, 0)
    assert not caplog.records
    for rollout_id in (1, 2):
        tracking.log({"rollout/unscored": 4.0}, rollout_id)
    (record,) = caplog.records
    assert record.getMessage().startswith("nothing is learned from rollout 1: --reward math could score none of its 4 samples")


def test_groups_without_a_difference_are_told_once(make, caplog):
    tracking.init(make(advantage_estimator="grpo"))
    for rollout_id, share in enumerate([1.0, 1.0, 0.9, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]):
        assert bool(caplog.records) == (rollout_id > 5)
        tracking.log({"rollout/unscored": 0.0, "rollout/reward": 1.0, "rollout/uniform_groups_share": share}, rollout_id)
    (record,) = caplog.records
    assert "in the last 3 rollouts all answers to a prompt had equal rewards (on average 1): grpo learns nothing" in record.getMessage()


def test_prompts_that_are_left_out_are_told_once(make, caplog):
    tracking.init(make())
    for rollout_id in range(3):
        tracking.log({"rollout/prompts_left_out": 2.0}, rollout_id)
    (record,) = caplog.records
    assert record.getMessage().startswith("2 prompts of the data are left out; ")
