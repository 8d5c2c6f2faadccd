"""A checkpoint counts when it is whole, and old ones go only then."""

import json
import math
import os
import resource
import shutil

import pytest

from miles.config.checkpoint_files import complete, damage, sums
from miles.config.places import newest_checkpoint
from miles.ray.checkpoints import Checkpoints, SaveError, newest


def save(book, rollout_id, parts=("actor", "executor"), text="weights"):
    for part in parts:
        folder = book.directory / book.begin(rollout_id)
        if part == "executor":
            (folder / "executor.json").write_text(f"{{}} {text}")
            book.written(rollout_id, part)
        else:
            (folder / part).mkdir()
            (folder / part / "data").write_text(text)
            book.written(rollout_id, part, sums(folder, [folder / part / "data"]))


def names(folder):
    return sorted(path.name for path in folder.glob("*rollout_*"))


def test_complete_comes_with_the_last_part_in_any_order(tmp_path):
    book = Checkpoints(str(tmp_path))
    book.parts = ("actor", "critic", "executor")
    save(book, 3, ("executor", "actor"))
    assert complete(tmp_path) == {}
    assert not (tmp_path / "latest").exists()
    save(book, 3, ("critic",))
    assert complete(tmp_path) == {3: tmp_path / "rollout_000003"}
    told = json.loads((tmp_path / "rollout_000003" / "COMPLETE").read_text())
    assert told["rollout_id"] == 3
    assert sorted(told["files"]) == ["actor/data", "critic/data", "executor.json"]
    assert damage(tmp_path / "rollout_000003") == ""
    assert (tmp_path / "latest").read_text() == "rollout_000003\n"
    assert book.last_complete == 3
    assert names(tmp_path) == ["rollout_000003"]


def test_saving_an_id_again_leaves_the_whole_one_until_the_new_one_is_whole(tmp_path):
    book = Checkpoints(str(tmp_path))
    save(book, 1, text="first")
    save(book, 1, ("actor",), text="second")
    assert newest(str(tmp_path)) == tmp_path / "rollout_000001"
    assert (tmp_path / "rollout_000001" / "actor" / "data").read_text() == "first"
    save(book, 1, ("executor",), text="second")
    assert (tmp_path / "rollout_000001" / "actor" / "data").read_text() == "second"
    assert damage(tmp_path / "rollout_000001") == ""
    assert names(tmp_path) == ["rollout_000001"]


def test_only_complete_ones_are_pruned_and_found(tmp_path):
    book = Checkpoints(str(tmp_path), keep=2)
    for rollout_id in range(4):
        save(book, rollout_id)
    save(book, 4, ("actor",))
    assert names(tmp_path) == [".rollout_000004.saving", "rollout_000002", "rollout_000003"]
    assert newest(str(tmp_path)) == tmp_path / "rollout_000003"
    assert newest(str(tmp_path / "rollout_000002")) == tmp_path / "rollout_000002"


def test_keeping_one_never_leaves_none(tmp_path):
    book = Checkpoints(str(tmp_path), keep=1)
    save(book, 0)
    save(book, 1, ("actor",))
    assert list(complete(tmp_path)) == [0]
    save(book, 1, ("executor",))
    assert list(complete(tmp_path)) == [1]


@pytest.mark.parametrize(("metric", "best"), [("eval/sums/reward", 1), ("-eval/sums/reward", 2), (None, None)])
def test_the_best_stays_and_is_pointed_at_whenever_its_score_comes(tmp_path, metric, best):
    book = Checkpoints(str(tmp_path), keep=1, best=metric)
    for rollout_id, value in enumerate((0.5, 0.9, 0.1, 0.4)):
        save(book, rollout_id)
        book.score(rollout_id, {"eval/sums/reward": value, "eval/other/reward": 9.0})
    book.score(7, {"eval/sums/reward": 0.2})  # not saved
    assert sorted(complete(tmp_path)) == sorted({3} | ({best} if best is not None else set()))
    assert (tmp_path / "best").exists() == (best is not None)
    if best is None:
        return
    assert (tmp_path / "best").read_text() == f"rollout_{best:06d}\n"
    resumed = Checkpoints(str(tmp_path), keep=1, best=metric)  # remembers the scores
    for rollout_id in (4, 5):
        save(resumed, rollout_id)
    assert sorted(complete(tmp_path)) == [best, 5]


def damaged(path, how):
    data = path.read_bytes()
    if how == "one bit":
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    elif how == "cut":
        path.write_bytes(data[:-1])
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["one bit", "cut", "gone"])
@pytest.mark.parametrize("file", ["actor/data", "executor.json"])
def test_a_damaged_one_is_skipped_with_a_warning_and_refused_when_named(tmp_path, caplog, how, file):
    book = Checkpoints(str(tmp_path))
    for rollout_id in range(3):
        save(book, rollout_id)
    damaged(tmp_path / "rollout_000002" / file, how)
    assert newest(str(tmp_path)) == tmp_path / "rollout_000001"
    assert newest_checkpoint(tmp_path) == 1
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "rollout_000002 is damaged and does not count" in warning
    assert str(tmp_path / "rollout_000002" / file) in warning
    with pytest.raises(ValueError, match=rf"--load: .*rollout_000002/{file}"):
        newest(str(tmp_path / "rollout_000002"))


@pytest.mark.parametrize("seal", ['{"rollout_id": 0, "fi', "", "\0" * 99, "[]", '{"files": {"actor/data": 3}}'])
def test_a_torn_seal_is_damage_too(tmp_path, seal):
    book = Checkpoints(str(tmp_path))
    save(book, 0)
    (tmp_path / "rollout_000000" / "COMPLETE").write_text(seal)
    with pytest.raises(ValueError, match="no complete checkpoint"):
        newest(str(tmp_path))


def test_what_a_killed_run_left_is_mended(tmp_path):
    book = Checkpoints(str(tmp_path))
    save(book, 0)
    save(book, 1)
    save(book, 2, ("actor",))
    os.rename(tmp_path / "rollout_000001", tmp_path / ".rollout_000001.old")  # killed between the two renames of a replacement
    shutil.copytree(tmp_path / "rollout_000000", tmp_path / ".rollout_000000.old")  # killed after both
    Checkpoints(str(tmp_path))
    assert names(tmp_path) == ["rollout_000000", "rollout_000001"]
    assert newest(str(tmp_path)) == tmp_path / "rollout_000001"


def test_nothing_complete_is_said(tmp_path):
    with pytest.raises(ValueError, match="--load: no complete checkpoint"):
        newest(str(tmp_path / "nowhere"))


def test_a_later_one_of_an_earlier_course_does_not_outlive_what_is_saved_now(tmp_path):
    """It is damaged, or the run was resumed from an older one on purpose: kept as the newest, it would drive out the only good one."""
    book = Checkpoints(str(tmp_path))
    for rollout_id in range(4):
        save(book, rollout_id)
    damaged(tmp_path / "rollout_000003" / "executor.json", "cut")
    again = Checkpoints(str(tmp_path), keep=1)
    save(again, 2)
    assert names(tmp_path) == ["rollout_000002", "rollout_000003.aside1"]
    assert newest(str(tmp_path)) == tmp_path / "rollout_000002"
    save(again, 3)
    assert names(tmp_path) == ["rollout_000003", "rollout_000003.aside1"]


def test_the_best_of_equals_is_the_newest_and_no_number_is_no_score(tmp_path, caplog):
    book = Checkpoints(str(tmp_path), keep=1, best="eval/sums/reward")
    for rollout_id, value in enumerate((0.5, 0.5, math.nan, 0.1, math.inf, 0.2)):
        save(book, rollout_id)
        book.score(rollout_id, {"eval/sums/reward": value})
    book.score(6, {"eval/other/reward": 1.0})
    assert sorted(complete(tmp_path)) == [1, 5]
    assert "rollout 2 has nan" in caplog.text
    resumed = Checkpoints(str(tmp_path), keep=1, best="eval/sums/reward")
    resumed.going_on(0)
    save(resumed, 1)  # other weights than those that were evaluated as 0.5
    save(resumed, 2)
    assert sorted(complete(tmp_path)) == [2]
    lacking = Checkpoints(str(tmp_path), best="eval/nope/reward")
    lacking.score(2, {"eval/sums/reward": 1.0})
    assert "--keep-best-metric eval/nope/reward: the evaluation after rollout 2 has only eval/sums/reward" in caplog.text


def test_what_the_file_system_refuses_is_told_in_one_line_and_spoils_nothing(tmp_path):
    """Also when a library tells it as text alone, or keeps the number to itself."""
    book = Checkpoints(str(tmp_path))
    with pytest.raises(SaveError, match=r"cannot be written: a file was taken only in part .*; there is none before it"), book.writing(0):
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    save(book, 0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with (
            pytest.raises(SaveError, match=rf"--save {tmp_path}: .* rollout 1 .*: File too large .*; rollout_000000, which is comp"),
            book.writing(1),
        ):
            save(book, 1, text="x" * 200)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert newest(str(tmp_path)) == tmp_path / "rollout_000000"
    with pytest.raises(SaveError, match="No space left on device"), book.writing(1):
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
    with pytest.raises(RuntimeError, match="of its own"), book.writing(1):
        raise RuntimeError("a fault of its own [Errno 111] Connection refused")
