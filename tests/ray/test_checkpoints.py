"""A checkpoint counts when it is whole, and old ones go only then."""

import json

import pytest

from miles.ray.checkpoints import Checkpoints, complete, newest


def save(book, rollout_id, parts=("actor", "executor")):
    for part in parts:
        book.begin(rollout_id)
        book.written(rollout_id, part)


def test_complete_comes_with_the_last_part_in_any_order(tmp_path):
    book = Checkpoints(str(tmp_path))
    book.parts = ("actor", "critic", "executor")
    save(book, 3, ("executor", "actor"))
    assert complete(tmp_path) == {}
    save(book, 3, ("critic",))
    assert complete(tmp_path) == {3: tmp_path / "rollout_000003"}
    assert json.loads((tmp_path / "rollout_000003" / "COMPLETE").read_text())["rollout_id"] == 3
    assert (tmp_path / "latest").read_text() == "rollout_000003\n"
    assert book.last_complete == 3


def test_saving_an_id_again_takes_its_mark_away_first(tmp_path):
    book = Checkpoints(str(tmp_path))
    save(book, 1)
    book.begin(1)
    assert complete(tmp_path) == {}
    book.written(1, "actor")
    book.begin(1)
    book.written(1, "executor")
    assert list(complete(tmp_path)) == [1]


def test_only_complete_ones_are_pruned_and_found(tmp_path):
    book = Checkpoints(str(tmp_path), keep=2)
    for rollout_id in range(4):
        save(book, rollout_id)
    book.begin(4)
    book.written(4, "actor")
    assert sorted(path.name for path in tmp_path.glob("rollout_*")) == ["rollout_000002", "rollout_000003", "rollout_000004"]
    assert newest(str(tmp_path)) == tmp_path / "rollout_000003"
    assert newest(str(tmp_path / "rollout_000002")) == tmp_path / "rollout_000002"


def test_nothing_complete_is_said(tmp_path):
    with pytest.raises(ValueError, match="--load: no complete checkpoint"):
        newest(str(tmp_path / "nowhere"))
