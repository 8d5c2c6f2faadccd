"""The run folder: new, moved aside, or continued without a fold-back."""

import logging
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from miles.config import metrics_file
from miles.tracking import history, ledger, run_folder, tracking
from miles.tracking.ledger import Ledger


def test_a_new_folder_has_its_parts_and_the_effective_settings(make):
    args = make(seed=7)
    folder = run_folder.prepare(args)
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoints", "config.toml", "logs", "samples"]
    assert tomllib.loads((folder / "config.toml").read_text())["run"]["seed"] == 7


def test_an_earlier_run_is_moved_aside_never_overwritten(make, caplog):
    caplog.set_level(logging.INFO)
    args = make()
    for number in range(3):
        folder = run_folder.prepare(args)
        (folder / "mine").write_text(str(number))
    names = {path.name: (path / "mine").read_text() for path in Path(args.run_root).iterdir()}
    assert names == {"r": "2", "r.1": "0", "r.2": "1"}
    assert "(was" not in caplog.text
    run_folder.prepare(make(seed=7, lora_rank=8))
    assert f"r.3; this one has --seed 7 (was {args.seed}), " in caplog.text
    assert "--lora-rank 8 (was 0)" in caplog.text


@pytest.mark.parametrize("left", [None, "samples/rollout_0.jsonl", "checkpoints/rollout_000000/COMPLETE", "notes.txt", "metrics.jsonl"])
def test_a_run_that_ended_before_it_measured_anything_gives_way_to_the_next(make, left):
    args = make()
    for _ in range(3):
        tracking.init(args)
        tracking.finish()
    folder = Path(args.run_dir)
    assert [path.name for path in folder.parent.iterdir()] == ["r"]
    if left is not None:
        (folder / left).parent.mkdir(exist_ok=True)
        (folder / left).write_text("{}\n")
        tracking.init(args)
        tracking.finish()
        assert sorted(path.name for path in folder.parent.iterdir()) == ["r", "r.1"]


def test_an_empty_folder_is_taken_as_it_is(make):
    args = make()
    Path(args.run_dir).mkdir(parents=True)
    run_folder.prepare(args)
    assert [path.name for path in Path(args.run_root).iterdir()] == ["r"]


def test_a_name_that_is_in_use_is_refused_until_that_run_ends(make):
    args = make()
    living = run_folder.lock(run_folder.prepare(args))
    with pytest.raises(ValueError, match="--name r: a run of that name is going on"):
        run_folder.prepare(args)
    assert [path.name for path in Path(args.run_root).iterdir()] == ["r"]
    os.close(living)
    run_folder.prepare(args)


def test_a_folder_that_cannot_be_made_is_named(make, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--run-root .*file: cannot make the run's folder"):
        run_folder.prepare(make(run_root=str(tmp_path / "file")))


def play(args, rollouts: range) -> None:
    """A plain asynchronous run: the next rollout's groups are taken before this one is trained."""
    tracking.init(args)
    books = Ledger(Path(args.run_dir) / "ledger.jsonl")
    if rollouts.start == 0:
        books.note_all("taken", (0, 1))
    else:
        books.rewind(1000, rollouts.start - 1)
    for rollout in rollouts:
        books.note_all("taken", (rollout * 2 + 2, rollout * 2 + 3))
        books.note_all("trained", (rollout * 2, rollout * 2 + 1), rollout_id=rollout, step=rollout + 1)
        tracking.log({"rollout/reward": rollout / 10}, rollout)
        tracking.log({"train/loss": 1.0}, rollout, rollout + 1)
        (Path(args.run_dir) / "samples" / f"rollout_{rollout:06d}.jsonl").write_text("{}\n")
    books.close()
    tracking.finish()


@pytest.mark.case("C93")
@pytest.mark.parametrize("named", ["folder", "rollout"])
def test_after_a_resume_the_curve_goes_on_without_a_fold_back(make, checkpoint, named):
    args = make()
    play(args, range(5))
    load = checkpoint(args, 2)
    load = load if named == "folder" else f"{load}/rollout_000002"
    resumed = make(load=load)
    tracking.init(resumed)
    tracking.finish()
    assert [path.name for path in Path(args.run_root).iterdir()] == ["r"]
    assert sorted(path.name for path in (Path(args.run_dir) / "samples").iterdir()) == [f"rollout_{n:06d}.jsonl" for n in range(3)]
    books = Ledger(Path(args.run_dir) / "ledger.jsonl")
    books.rewind(next(line["number"] for line in ledger.read(books.path) if line["group_index"] == 8), 2)
    books.close()
    play(resumed, range(3, 6))
    read = metrics_file.read(args.run_dir)
    assert history.series(read, "rollout/reward") == ([0, 1, 2, 3, 4, 5], [0.0, 0.1, 0.2, 0.3, 0.4, 0.5])
    assert [line["rollout_id"] for line in read] == sorted(line["rollout_id"] for line in read)
    books = ledger.balance(ledger.read(Path(args.run_dir) / "ledger.jsonl"))
    assert books.holds, books.faults
    assert books.ended["trained"] == 12


def test_an_explicit_first_rollout_decides_what_is_cut(make, checkpoint):
    args = make()
    play(args, range(5))
    tracking.init(make(load=checkpoint(args, 2), start_rollout_id=1))
    assert history.series(metrics_file.read(args.run_dir), "rollout/reward")[0] == [0]


def test_a_checkpoint_of_another_run_moves_the_old_folder_aside(make, checkpoint):
    other = make(name="other")
    run_folder.prepare(other)
    args = make(load=checkpoint(other, 2))
    play(make(), range(2))
    run_folder.prepare(args)
    assert sorted(path.name for path in Path(args.run_root).iterdir()) == ["other", "r", "r.1"]


def test_a_torn_last_line_is_cut_off_at_a_resume(make, checkpoint):
    args = make()
    play(args, range(2))
    with (Path(args.run_dir) / "metrics.jsonl").open("a") as file:
        file.write('{"rollout_id": 1, "st')
    tracking.init(make(load=checkpoint(args, 1)))
    tracking.log({"rollout/reward": 0.2}, 2)
    assert history.series(metrics_file.read(args.run_dir), "rollout/reward")[0] == [0, 1, 2]


def test_workers_of_a_killed_run_are_waited_for(make, monkeypatch):
    folder = run_folder.prepare(make())
    code = (
        "import sys; from pathlib import Path; from miles.tracking import run_folder; run_folder.share(Path(sys.argv[1])); print(); input()"
    )
    orphan = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert orphan.stdout.readline() == b"\n"
    waits = []

    def wait(seconds):
        waits.append(seconds)
        if len(waits) == 2:
            orphan.communicate(b"\n")

    monkeypatch.setattr(run_folder.time, "sleep", wait)
    assert run_folder.prepare(make()) == folder
    assert len(waits) == 2

    orphan = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert orphan.stdout.readline() == b"\n"
    monkeypatch.setattr(run_folder, "_ORPHANS_LIMIT", 0.0)
    with pytest.raises(ValueError, match=r"--name r: workers of a run of that name still live"):
        run_folder.prepare(make())
    orphan.communicate(b"\n")


def test_checkpoints_of_another_run_are_not_replaced(make, checkpoint, tmp_path):
    place = str(tmp_path / "kept")
    checkpoint(make(save=place), 3)
    with pytest.raises(ValueError, match=r"--save .*kept: has checkpoints of an earlier run already \(rollout_000003"):
        run_folder.prepare(make(save=place))
    run_folder.prepare(make(save=place, load=place))
    run_folder.prepare(make(save=place, load=f"{place}/rollout_000003"))


def test_a_damaged_file_for_trackers_is_made_anew(make, checkpoint, caplog):
    args = make()
    folder = run_folder.prepare(args)
    for damage in ("", "[1]", "\0" * 40):
        (folder / "trackers.json").write_text(damage)
        assert run_folder.Trackers.load(folder).sent_through == -1
    assert "trackers.json cannot be read" in caplog.text


def test_of_two_that_start_at_once_one_is_refused(make):
    folder = run_folder.prepare(make())
    file = run_folder.lock(folder)
    with pytest.raises(ValueError, match="--name r: another process has just begun"):
        run_folder.lock(folder)
    os.close(file)
    os.close(run_folder.lock(folder))
