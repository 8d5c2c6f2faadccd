"""Defaults < files < flags; everything wrong at once; help in no time."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from miles.config import other_names
from miles.config.cli import SettingsError, parse_args, resolve
from miles.config.schema import flag, settings

ROOT = Path(__file__).parents[2]


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@pytest.mark.case("C90")
def test_a_flag_beats_the_file_and_the_file_beats_the_default(tmp_path, run):
    file = write(tmp_path / "run.toml", "[rollout]\nn_samples_per_prompt = 4\n")
    assert run("--config", file, "--n-samples-per-prompt", "16").n_samples_per_prompt == 16
    assert run("--n-samples-per-prompt=16", "--config", file).n_samples_per_prompt == 16
    assert run("--config", file).n_samples_per_prompt == 4
    assert run().n_samples_per_prompt == 8


@pytest.mark.case("C90")
def test_the_origin_of_each_value_is_kept(tmp_path, run):
    first = write(tmp_path / "a.toml", "[rollout]\nn_samples_per_prompt = 4\nmax_turns = 5\n[run]\nseed = 1\n")
    second = write(tmp_path / "b.toml", "[run]\nseed = 2\n")
    args = run("--config", first, "--config", second, "--max-turns", "7")
    assert (args.seed, args.max_turns, args.n_samples_per_prompt) == (2, 7, 4)
    assert {name: args.origins[name] for name in ("seed", "max_turns", "n_samples_per_prompt")} == {
        "seed": second,
        "max_turns": "flag",
        "n_samples_per_prompt": first,
    }
    assert "lr" not in args.origins


def test_a_preset_stands_between_file_and_flag(tmp_path, good):
    file = write(tmp_path / "run.toml", '[algorithm]\nadvantage_estimator = "ppo"\n')
    preset = {"advantage_estimator": "sft"}
    assert resolve([*good, "--config", file], preset=preset).advantage_estimator == "sft"
    assert resolve([*good, "--advantage-estimator", "grpo"], preset=preset).advantage_estimator == "grpo"


def test_everything_that_is_wrong_is_said_at_once(tmp_path, refusal):
    file = write(
        tmp_path / "run.toml",
        "stray = 1\n[run]\nnum_rollout = 4\n[rollout]\ntop_q = 3\nmax_turns = 0\n[rolout]\nx = 1\n"
        "[eval]\neval_data = {a = 'nowhere.jsonl'}\n",
    )
    said = refusal("--config", file, "--temperature", "-1", "--num-roll", "3", "--lr", "abc", "--fully-async", "--pause-mode", "abort")
    for part in (
        "--num-roll: unknown flag; did you mean --num-rollout?",
        "--lr: must be a number, got 'abc'",
        f"{file}: stray stands outside of any table",
        f"{file}: [run] num_rollout: belongs below [rollout]",
        f"{file}: [rollout] top_q: unknown key; did you mean top_p?",
        f"{file}: unknown table [rolout]; did you mean rollout?",
        f"--max-turns: must be at least 1, got 0 ({file})",
        "--temperature -1.0: must be greater than 0",
        "--fully-async, --pause-mode abort:",
        "--eval-data a=nowhere.jsonl: no such file",
    ):
        assert part in said
    assert said.startswith("10 problems in the settings:")


@pytest.mark.parametrize(
    ("table", "key", "meant"),
    [
        ("train", "learning_rate", "lr"),
        ("train", "batch_size", "rollout_batch_size below [rollout] or global_batch_size"),
        ("data", "num_epochs", "num_epoch"),
        ("train", "epochs", "num_epoch below [data]"),
        ("rollout", "max_new_tokens", "max_response_length"),
        ("rollout", "num_generations", "n_samples_per_prompt"),
        ("algorithm", "clip_range", "eps_clip"),
        ("algorithm", "beta", "kl_loss_coef"),
        ("engine", "max_model_len", "engine_max_context"),
        ("eval", "interval", "eval_interval"),
        ("train", "weigth_decay", "weight_decay"),
    ],
)
def test_names_of_other_systems_are_known_in_files_and_as_flags(tmp_path, refusal, table, key, meant):
    said = refusal("--config", write(tmp_path / "run.toml", f"[{table}]\n{key} = 1\n"))
    assert f"[{table}] {key}: unknown key; did you mean {meant}?" in said
    flags = " or ".join(flag(name.split()[0]) for name in meant.split(" or "))
    if key != "interval":
        assert f"{flag(key)}: unknown flag; did you mean {flags}?" in refusal(flag(key), "1")


def test_every_name_of_another_system_stands_for_settings_and_is_none_itself():
    names = [name for settings in other_names.MEANT.values() for name in settings.split()]
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
    assert not set(names) & settings().keys()
    assert {name for group in other_names.MEANT for name in group.split()} <= settings().keys()


def test_a_value_that_could_not_be_read_is_not_judged_twice(refusal):
    said = refusal("--temperature", "warm")
    assert said.count("--temperature") == 1


def test_wrong_settings_end_with_exit_code_2_and_no_traceback(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_args(["--temperture", "1"], prog="miles train-async")
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("miles train-async: ")
    assert "did you mean --temperature?" in said
    assert "Traceback" not in said


def test_a_key_set_for_a_type_it_does_not_have_is_refused(tmp_path, refusal):
    file = write(tmp_path / "run.toml", '[rollout]\nn_samples_per_prompt = true\ntop_k = "3"\nstop = "x"\n[data]\nprompt_key = 3\n')
    said = refusal("--config", file)
    assert "--n-samples-per-prompt: must be a whole number, got True" in said
    assert "--top-k: must be a whole number, got '3'" in said
    assert "--stop: must be a list, got 'x'" in said
    assert "--prompt-key: must be a string, got 3" in said


def test_files_that_cannot_be_read_are_named(tmp_path, refusal):
    assert "--config nowhere.toml: No such file" in refusal("--config", "nowhere.toml")
    assert "not TOML" in refusal("--config", write(tmp_path / "x.toml", "[run\n"))
    binary = tmp_path / "b.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "not TOML" in refusal("--config", str(binary))
    assert "--config: needs a file" in refusal("--config")


def test_choices_are_listed(refusal):
    assert "--pause-mode: must be one of retract, in_place, abort, got 'stop'" in refusal("--pause-mode", "stop")
    assert "--trackers: entry 1: must be one of tensorboard, wandb, mlflow, trackio, got 'w'" in refusal("--trackers", "wandb", "w")


def test_help_names_every_setting_with_its_docstring(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_args(["--lr", "nonsense", "--help"], prog="miles train-async")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for setting in settings().values():
        assert f"  {setting.flag}" in text
    assert "Sampling temperature in training; the trainer's log-probs use it too. (default: 1.0)" in " ".join(text.split())
    assert "[rollout] how prompts become scored samples" in text


def test_help_is_instant_and_imports_no_heavy_library():
    """Processor time, best of five, as the machine may be busy; what else runs on the core's other half still counts double."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    heavy = "torch numpy ray transformers rich matplotlib fastapi pydantic_settings"
    code = (
        "import sys; from miles.cli.main import main\n"
        "try: main(['train-async', '--help'])\n"
        "except SystemExit: pass\n"
        f"sys.exit(any(name in sys.modules for name in {heavy.split()}))"
    )
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], env=environment, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) < 1.0, times


def test_help_into_a_pipe_that_closes_is_no_error():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = f"{sys.executable} -m miles.cli.main train --help | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: miles train")


def test_resolve_without_checks_takes_settings_as_they_are():
    assert resolve(["--temperature", "0"], check=False).temperature == 0
    with pytest.raises(SettingsError):
        resolve(["--nonsense"], check=False)
