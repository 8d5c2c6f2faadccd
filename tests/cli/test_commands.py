"""The miles command, as a user types it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from miles.cli.main import COMMANDS, main
from miles.config.run_config import RunConfig
from miles.plugins import load
from miles.tracking import tracking

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A finished run, and the folder it was started from as working directory."""
    monkeypatch.chdir(tmp_path)
    args = RunConfig(name="first", console="quiet", num_rollout=3)
    tracking.init(args)
    for rollout in range(3):
        tracking.log({"rollout/reward": rollout / 4, "train/lr": 1e-6}, rollout)
        tracking.log({"eval/held_out/reward": rollout / 3}, rollout)
        tracking.timeline().add("actor", "train", rollout, rollout + 1.0, rollout_id=rollout)
    tracking.finish()
    return args


def test_help_lists_every_command(capsys):
    for argv in ([], ["--help"], ["-h"], ["help"]):
        assert main(argv) == 0
        text = capsys.readouterr().out
        assert all(f"  {name}" in text for name in COMMANDS)


def test_an_unknown_command_names_the_nearest(capsys):
    assert main(["trian-async"]) == 2
    assert "did you mean train-async?" in capsys.readouterr().err


def test_every_command_has_its_file():
    missing = [name for name in COMMANDS if not (ROOT / "miles" / "cli" / f"{name.replace('-', '_')}.py").exists()]
    assert [name for name in missing if name != "get-model"] == []
    for name in set(COMMANDS) - set(missing) - {"get-model"}:
        assert callable(load(f"miles.cli.{name.replace('-', '_')}.main"))


@pytest.mark.parametrize("command", ["train-async", "train", "sft"])
def test_wrong_settings_are_refused_before_anything_heavy(capsys, command):
    with pytest.raises(SystemExit) as caught:
        main([command, "--temprature", "3"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith(f"miles {command}: ")


def test_the_drivers_own_refusals_come_early(tmp_path, capsys):
    (tmp_path / "d.jsonl").write_text("{}\n")
    flags = ["--prompt-data", str(tmp_path / "d.jsonl"), "--hf-checkpoint", "random:tiny", "--num-rollout", "1"]
    assert main(["train-async", *flags]) == 2
    assert "--use-tis" in capsys.readouterr().err
    assert main(["train-async", *flags, "--colocate"]) == 2
    assert "--colocate" in capsys.readouterr().err
    assert main(["train", *flags, "--fully-async"]) == 2
    assert "--fully-async" in capsys.readouterr().err


def test_a_driver_runs_as_the_script_that_it_is(tmp_path):
    """An installed driver is found by its name; its settings are those of the command line."""
    (tmp_path / "train_async.py").write_text(
        "from miles.config.cli import parse_args\n"
        "if __name__ == '__main__':\n"
        "    args = parse_args()\n"
        "    print('driver', args.num_rollout)\n"
        "    raise SystemExit(7)\n"
    )
    (tmp_path / "d.jsonl").write_text("{}\n")
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; from miles.cli.main import main; sys.exit(main())"
    flags = ["--prompt-data", "d.jsonl", "--hf-checkpoint", "random:tiny", "--num-rollout", "5", "--use-tis"]
    done = subprocess.run([sys.executable, "-c", code, "train-async", *flags], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (7, "driver 5\n"), done.stderr


def test_show(run, capsys):
    assert main(["show", "first", "--steps", "2", "--metric", "train/lr"]) == 0
    text = capsys.readouterr().out
    assert "0.25" in text
    assert "0.667" in text
    assert "1e-06" in text
    assert "\n 0 " not in text


def test_show_of_a_run_without_metrics(run, capsys):
    Path("runs/first/metrics.jsonl").unlink()
    assert main(["show", "first"]) == 0
    assert "no metrics yet" in capsys.readouterr().out


def test_plot(run, capsys):
    assert main(["plot", "runs/first"]) == 0
    assert capsys.readouterr().out.strip() == "runs/first/plot.png"
    assert Path("runs/first/plot.png").exists()


def test_plot_of_a_run_without_metrics_is_refused(run, capsys):
    Path("runs/first/metrics.jsonl").unlink()
    assert main(["plot", "first"]) == 1
    assert "no metrics yet" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["show", "plot", "ledger"])
def test_a_run_that_is_not_there(run, capsys, command):
    with pytest.raises(SystemExit) as caught:
        main([command, "second"])
    assert caught.value.code == 2
    assert "in runs/ there are first" in capsys.readouterr().err


def test_ledger(run, capsys):
    notes = [{"event": "taken", "group_index": n} for n in range(4)]
    notes += [{"event": "trained", "group_index": 0, "rollout_id": 0}, {"event": "dropped", "group_index": 1, "reason": "timeout"}]
    path = Path("runs/first/ledger.jsonl")
    path.write_text("".join(json.dumps(note) + "\n" for note in notes))
    assert main(["ledger", "first"]) == 0
    text = capsys.readouterr().out
    assert "timeout" in text
    assert "groups 2, 3" in text
    assert "the books balance" in text
    with pytest.raises(SystemExit):
        main(["ledger", "first", "--group", "99"])
    assert "--group 99: the ledger has no such group; the last one is " in capsys.readouterr().err
    assert main(["ledger", "first", "--group", "1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    path.write_text(path.read_text() + json.dumps(notes[-1]) + "\n")
    assert main(["ledger", "first"]) == 1
    assert "WRONG: group 1 ended" in capsys.readouterr().out
    path.write_text("\0\n" + "".join(json.dumps(note) + "\n" for note in notes))
    assert main(["ledger", "first"]) == 1
    assert "line 1 is damaged" in capsys.readouterr().out


def test_settings_doc(tmp_path, capsys):
    page = tmp_path / "docs" / "settings.md"
    assert main(["settings-doc", "--check", "--out", str(page)]) == 1
    assert main(["settings-doc", "--out", str(page)]) == 0
    assert main(["settings-doc", "--check", "--out", str(page)]) == 0
    page.write_text("old")
    assert main(["settings-doc", "--check", "--out", str(page)]) == 1


def test_whoever_reads_the_output_may_go_away(run):
    """As `head` does. Nothing of it is told, and the exit code says that not all was read."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "miles.cli.main", "show", "first"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")
