"""Saving beside training, and what a damaged checkpoint costs."""

import threading

import pytest

from miles.train.checkpoint import Checkpointer
from miles.train.trainer import Trainer

pytestmark = pytest.mark.filterwarnings("default")  # as users run it


def test_training_goes_on_while_a_checkpoint_is_written(drive, monkeypatch):
    trained_far = threading.Event()
    sums, train = Checkpointer._sums, Trainer.train

    def slow_sums(self, directory, writing):
        assert trained_far.wait(60), "training waited for the checkpoint"
        return sums(self, directory, writing)

    def watched_train(self, rollout_id, *args):
        if rollout_id == 4:
            trained_far.set()
        return train(self, rollout_id, *args)

    monkeypatch.setattr(Checkpointer, "_sums", slow_sums)
    monkeypatch.setattr(Trainer, "train", watched_train)
    run = drive("beside", "--num-rollout", 6, "--save-interval", 3, "--keep-checkpoints", 1, "--fully-async", "--max-weight-staleness", 4)
    assert [path.name for path in (run.folder / "checkpoints").glob("*rollout_*")] == ["rollout_000005"]


def test_a_damaged_checkpoint_is_passed_over_and_refused_when_named(drive, capsys, tmp_path):
    flags = ("--save-interval", 2, "--save-hf", "--save-trigger-sentinel", tmp_path / "ask")
    (tmp_path / "ask").touch()
    first = drive("first", "--num-rollout", 4, *flags)
    checkpoints = first.folder / "checkpoints"
    assert sorted(path.name for path in checkpoints.glob("rollout_*")) == ["rollout_000000", "rollout_000001", "rollout_000003"]
    assert (tmp_path / "ask.saved").read_text() == "0\n"
    assert not list(tmp_path.glob("ask*ing"))
    (weights,) = (checkpoints / "rollout_000003" / "actor").glob("__0_0.distcp")
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    run = drive("again", "--num-rollout", 4, "--load", checkpoints)
    assert [rollout for rollout, _ in run.series("train/loss")] == [2, 3]
    with pytest.raises(SystemExit):
        drive("named", "--num-rollout", 6, "--load", checkpoints / "rollout_000003")
    assert str(weights) in capsys.readouterr().err


def test_the_best_checkpoint_stays(drive):
    flags = ("--eval-interval", 1, "--save-interval", 1, "--keep-checkpoints", 1, "--keep-best-metric", "eval/sums/reward")
    run = drive("best", "--num-rollout", 4, *flags)
    checkpoints = run.folder / "checkpoints"
    scores = dict(run.series("eval/sums/reward"))  # rollout 0 was evaluated before and after its training: the later one counts
    best = max(scores, key=lambda rollout: (scores[rollout], rollout))
    assert (checkpoints / "best").read_text() == f"rollout_{best:06d}\n"
    kept = {path.name for path in checkpoints.glob("rollout_*")}
    assert kept <= {f"rollout_{best:06d}", "rollout_000002", "rollout_000003"}
    assert "rollout_000003" in kept
