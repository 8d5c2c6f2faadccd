"""Ranges, combinations, arithmetic, files."""

import json
import math

import pytest

from miles.config.algorithm_rules import max_weight_lag, validate_async_off_policy_correction
from miles.config.cli import SettingsError, resolve
from miles.config.places import newest_checkpoint
from miles.config.run_config import RunConfig
from miles.config.validate import validate, warnings_of


@pytest.mark.case("C86")
def test_a_batch_that_does_not_divide_shows_the_numbers(refusal):
    said = refusal("--num-rollout", "2", "--rollout-batch-size", "8", "--n-samples-per-prompt", "8", "--global-batch-size", "256")
    for part in ("--num-rollout 2", "--rollout-batch-size 8", "--n-samples-per-prompt 8", "--global-batch-size 256", "128 < 256"):
        assert part in said
    assert "must divide the samples of one rollout" in refusal("--global-batch-size", "48")


@pytest.mark.case("C86")
@pytest.mark.parametrize("size", [1, 2, 16, 64])
def test_a_batch_that_divides_is_taken(run, size):
    assert run("--global-batch-size", str(size)).samples_per_step == size


@pytest.mark.case("C88")
@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("--temperature", value) for value in ("0", "-1", "nan", "inf", "-inf")),
        *(("--top-p", value) for value in ("0", "1.2", "-0.1", "nan")),
        *(("--eval-top-p", value) for value in ("0", "1.2", "nan")),
        *(("--eval-temperature", value) for value in ("-0.1", "nan", "inf")),
        *(("--min-p", value) for value in ("-0.1", "1", "nan")),
        ("--top-k", "-1"),
        ("--n-samples-per-prompt", "0"),
        ("--rollout-batch-size", "-2"),
        ("--max-response-length", "-5"),
        ("--max-response-length", "0"),
        ("--eval-max-response-length", "-1"),
        ("--max-prompt-length", "0"),
        ("--lr", "nan"),
        ("--lr", "0"),
        ("--lr", "inf"),
        ("--gamma", "1.1"),
        ("--num-rollout", "0"),
        ("--sample-timeout", "nan"),
        ("--name", "a/b"),
        ("--name", ".."),
        ("--stop", ""),
        ("--stop-token-ids", "-1"),
        ("--seed", str(2**64)),
    ],
)
def test_values_out_of_range_are_refused_by_name(refusal, flag, value):
    assert f"  {flag}" in refusal(f"{flag}={value}")


@pytest.mark.case("C88")
def test_every_float_refuses_nan(refusal):
    from miles.config.schema import settings

    floats = [setting for setting in settings().values() if setting.kind == "float"]
    said = refusal(*(f"{setting.flag}=nan" for setting in floats))
    assert [setting.flag for setting in floats if f"  {setting.flag}" not in said] == []


@pytest.mark.case("C88")
def test_greedy_evaluation_is_accepted(run):
    assert run("--eval-temperature", "0").eval_temperature == 0


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--fully-async", "--pause-mode", "abort"], "--fully-async, --pause-mode abort"),
        (["--keep-old-actor", "--use-rollout-logprobs"], "--keep-old-actor, --use-rollout-logprobs"),
        (["--rollout-function", "fully_async"], "--rollout-function fully_async: is the other mode's function"),
        (["--rollout-function", "batch", "--fully-async"], "--rollout-function batch: is the other mode's function"),
        (["--kl-coef", "0.1"], "--kl-coef 0.1, --advantage-estimator grpo"),
        (["--num-critic-only-steps", "1"], "there is no critic"),
        (["--advantage-estimator", "maxrl", "--reward", "dapo"], "--reward dapo: maxrl divides by a group's mean reward"),
        (
            [
                "--engine",
                "sglang",
                "--sglang-urls",
                "http://localhost:1",
                *(f"--stop={letter}" for letter in "abcdefghijklmnopqrstuvwxyz0123456"),
            ],
            "--engine sglang: a server takes 32 strings",
        ),
        (["--n-samples-per-prompt", "1"], "grpo compares siblings"),
        (["--eval-interval", "2"], "needs --eval-data"),
        (["--keep-best-metric", "eval/sums/reward"], "--keep-best-metric eval/sums/reward: needs --eval-interval"),
        (["--eval-mode", "snapshot"], "needs --eval-function"),
        (["--eval-function", "my.evaluate"], "--eval-mode snapshot only"),
        (["--eval-data", "held_out=nowhere.jsonl"], "--eval-data held_out=nowhere.jsonl: no such file"),
        (["--prompt-data", "nowhere.jsonl"], "--prompt-data nowhere.jsonl: no such file"),
        (["--hf-checkpoint", "./nowhere"], "`miles get-model`"),
        (["--hf-checkpoint", "models/nowhere"], "`miles get-model`"),
        (["--ref-checkpoint", "/nowhere"], "--ref-checkpoint /nowhere: no such directory"),
        (["--load", "nowhere"], "--load nowhere: no such directory"),
        (["--load", "."], "--load .: no complete checkpoint there"),
        (["--max-response-length", "1024"], "no room is left for a prompt"),
        (["--max-prompt-length", "1000", "--max-response-length", "100"], "1000 + 100 = 1100 tokens do not fit into 1024"),
        (["--max-prompt-length", "1000", "--max-response-length", "8", "--eval-max-response-length", "50"], "in evaluation 1000 + 50"),
        (["--in-process", "--ray-address", "auto"], "one process needs no cluster"),
        (["--mini-ft-controller"], "--api-server-port"),
        (["--gpus-per-trainer", "2"], "must be at most 1"),
        (["--reward", "remote"], "needs --reward-url"),
        (["--num-trainers", "65"], "leaves some of 65 ranks without any"),
        (["--no-num-rollout"], "--num-rollout, --num-epoch: one of them"),
        (["--start-rollout-id", "4"], "nothing to do"),
        (["--min-lr", "1", "--lr-schedule", "cosine"], "may not end above its peak"),
        (["--top-p", "0.9"], "--top-p 0.9: log-probs are those of the whole distribution"),
        (["--top-k", "50"], "leave it at 0"),
        (["--min-p", "0.1"], "leave it at 0"),
        (["--advantage-estimator", "rloo", "--n-samples-per-prompt", "1"], "rloo compares siblings"),
        (["--advantage-estimator", "maxrl", "--n-samples-per-prompt", "1"], "maxrl compares siblings"),
        (["--advantage-estimator", "opd"], "needs a --teacher-checkpoint, or --teacher-urls"),
        (["--teacher-urls", "http://a:1", "--teacher-checkpoint", "random:tiny"], "one teacher at a time"),
        (["--teacher-urls", "http://a:1", "--temperature", "0.5"], "at temperature 1"),
        (["--teacher-urls", "http://a:1", "--deterministic"], "last bits"),
        (["--teacher-urls", "a:1"], "'a:1' is no address"),
        (["--teacher-urls", "http://a:1", "--advantage-estimator", "ppo"], "know nothing of a teacher"),
        (["--advantage-estimator", "ppo", "--teacher-checkpoint", "random:tiny"], "know nothing of a teacher"),
        (["--teacher-checkpoint", "/nowhere"], "--teacher-checkpoint /nowhere: no such directory"),
        (["--mask-level", "token"], "needs --mask-low, --mask-high or both"),
        (["--mask-low", "0.5"], "--mask-low 0.5: limits of --mask-level"),
        (["--mask-level", "token", "--mask-low", "2", "--mask-high", "1"], "nothing lies between them"),
        (["--dual-clip", "3", "--policy-loss", "sapo"], "--dual-clip 3.0, --policy-loss sapo: is for clipped and gspo"),
        (["--mask-outlier", "1"], "a ratio of 1 is no outlier"),
        (["--dual-clip", "1.1"], "must be above the upper clip, 1.2"),
        (["--score-centering", "8", "--policy-loss", "gspo"], "--score-centering 8, --policy-loss gspo: is for clipped and cispo"),
        (["--score-centering", "8", "--use-rollout-logprobs"], "choose one"),
        (
            ["--score-centering", "8", "--use-tis", "--tis-level", "sequence"],
            "--tis-level sequence: composes with weights and masks of single",
        ),
        (["--score-centering", "8", "--mask-outlier", "2"], "--mask-outlier 2.0: composes with"),
        (["--no-in-process", "--colocate", "--fully-async"], "--fully-async, --colocate"),
    ],
)
def test_combinations_that_cannot_work(refusal, flags, part):
    said = refusal(*flags)
    assert part in said
    assert said.startswith("1 problem "), said


@pytest.mark.parametrize("flag", ["--run-root", "--save", "--weight-sync-dir", "--eval-hf-dir"])
def test_a_place_where_nothing_can_be_written_is_named(refusal, run, flag, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    assert f"{flag} {tmp_path}/file/deep/er: {tmp_path}/file is not a folder" in refusal(flag, f"{tmp_path}/file/deep/er")
    run(flag, f"{tmp_path}/new/deep/er")
    assert f"--save-trigger-sentinel {tmp_path}/file/x: {tmp_path}/file is not a folder" in refusal(
        "--save-trigger-sentinel", f"{tmp_path}/file/x"
    )
    monkeypatch.setattr("os.access", lambda path, mode: str(path) != str(tmp_path))  # root may write everywhere
    assert f"nothing can be written in {tmp_path}" in refusal(flag, f"{tmp_path}/new")


def test_a_run_without_data_and_model_is_told_both():
    said = "\n".join(validate(RunConfig(num_rollout=1)))
    assert "--prompt-data" in said
    assert "--hf-checkpoint" in said


def test_models_that_are_not_directories(run, refusal, monkeypatch, tmp_path):
    assert run("--hf-checkpoint", "random:tiny")
    assert run("--hf-checkpoint", "HuggingFaceTB/SmolLM2-135M-Instruct")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert "HF_HUB_OFFLINE" in refusal("--hf-checkpoint", "HuggingFaceTB/SmolLM2-135M-Instruct")
    (tmp_path / "hub" / "models--HuggingFaceTB--SmolLM2-135M-Instruct").mkdir(parents=True)
    assert run("--hf-checkpoint", "HuggingFaceTB/SmolLM2-135M-Instruct")
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refusal("--hf-checkpoint", str(tmp_path / "empty"))
    assert "no such random model; there are tiny, " in refusal("--hf-checkpoint", "random:huge")


def test_a_model_that_was_not_copied_to_its_end_is_refused(refusal, tmp_path):
    folder = tmp_path / "model"
    weights, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    whole = weights.read_bytes()
    for content in (whole[:-1], whole + b"x"):
        weights.write_bytes(content)
        assert f"model.safetensors has {len(content)} bytes, and {len(whole)} by its header" in refusal("--hf-checkpoint", str(folder))
    for content in (whole[:12], b"", b"\xff" * 40, b"version https://git-lfs.github.com/spec/v1\n"):
        weights.write_bytes(content)
        assert "its weights cannot be read" in refusal("--hf-checkpoint", str(folder))
    weights.write_bytes(whole)
    index.write_text('{"weight_map": {"a": "model.safetensors", "b": "more.safetensors"}}')
    assert f"more.safetensors is not in that directory, and {index.name} names it" in refusal("--hf-checkpoint", str(folder))
    index.unlink()
    weights.unlink()
    assert "no weights in that directory" in refusal("--hf-checkpoint", str(folder))


@pytest.fixture
def checkpoints(tmp_path):
    """Complete checkpoints of rollouts 1 and 3, and a torn one of 5."""
    for number in (1, 3, 5):
        folder = tmp_path / "checkpoints" / f"rollout_{number:06d}"
        folder.mkdir(parents=True)
        if number != 5:
            (folder / "COMPLETE").write_text('{"files": {}}')
    return tmp_path / "checkpoints"


def test_the_newest_complete_checkpoint(checkpoints):
    assert newest_checkpoint(checkpoints) == 3
    assert newest_checkpoint(checkpoints / "rollout_000001") == 1
    assert newest_checkpoint(checkpoints / "rollout_000005") is None
    assert newest_checkpoint(checkpoints / "nowhere") is None


@pytest.mark.case("C67")
def test_a_finished_run_has_nothing_left_to_do(refusal, run, checkpoints):
    for total in ("4", "3"):
        said = refusal("--load", str(checkpoints), "--num-rollout", total)
        assert f"nothing to do: the checkpoint is at 4 of {total}" in said
    assert run("--load", str(checkpoints), "--num-rollout", "6").num_rollout == 6
    assert run("--load", str(checkpoints / "rollout_000001"), "--num-rollout", "4").num_rollout == 4


@pytest.mark.parametrize("estimator", ["grpo", "ppo"])
def test_an_async_run_must_choose_a_correction(run, estimator):
    args = run("--advantage-estimator", estimator, "--update-weights-interval", "3")
    with pytest.raises(ValueError) as caught:
        validate_async_off_policy_correction(args)
    for part in ("--use-rollout-logprobs", "--use-tis", "--keep-old-actor", "up to 3 rollout", estimator):
        assert part in str(caught.value)
    for correction in (["--use-rollout-logprobs"], ["--use-tis"], ["--keep-old-actor"], ["--score-centering", "8"]):
        validate_async_off_policy_correction(run("--advantage-estimator", estimator, *correction))


def test_a_correction_that_does_not_reach_far_enough_warns_with_the_numbers(run, caplog):
    validate_async_off_policy_correction(run("--keep-old-actor"))
    assert caplog.text == ""
    validate_async_off_policy_correction(run("--keep-old-actor", "--fully-async", "--max-weight-staleness", "4"))
    assert "--max-weight-staleness 4 they may be 4 rollouts old" in caplog.text
    caplog.clear()
    validate_async_off_policy_correction(run("--keep-old-actor", "--use-tis", "--fully-async"))
    assert caplog.text == ""


def test_sft_needs_no_correction(good):
    from miles.config.cli import resolve

    args = resolve([*good, "--n-samples-per-prompt", "1"], preset={"advantage_estimator": "sft"})
    validate_async_off_policy_correction(args)


@pytest.mark.parametrize("interval", [1, 2, 5])
def test_the_lag_law_of_plain_async(interval):
    """Batch r + 1 is requested at the start of iteration r, and weights are published after (r + 1) % k == 0."""
    published, lags = 0, []
    for rollout in range(3 * interval):
        lags.append(rollout + 1 - published)  # batch rollout + 1, trained after rollouts 0 .. rollout
        if (rollout + 1) % interval == 0:
            published = rollout + 1
    assert max(lags) == max_weight_lag(RunConfig(update_weights_interval=interval)) == interval


def test_warnings_tell_what_is_probably_not_meant():
    assert warnings_of(RunConfig()) == []
    assert any("--offload-train" in text for text in warnings_of(RunConfig(offload_train=True)))
    assert any("--use-tis" in text for text in warnings_of(RunConfig(use_tis=True, use_rollout_logprobs=True)))
    assert any("--eps-clip 0.2" in text for text in warnings_of(RunConfig(policy_loss="gspo")))
    assert warnings_of(RunConfig(policy_loss="gspo", eps_clip=3e-4)) == []
    assert any("--eps-clip-high" in text for text in warnings_of(RunConfig(policy_loss="cispo")))
    assert any("--api-server-host" in text for text in warnings_of(RunConfig(api_server_port=1, api_server_host="0.0.0.0")))


def test_nan_is_not_finite():
    assert any("--lr" in text for text in validate(RunConfig.model_construct(**{**RunConfig().__dict__, "lr": math.nan})))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--lora-alpha", "16"], "--lora-alpha 16.0: is of adapters, and without --lora-rank there are none"),
        (["--lora-targets", "q_proj"], "--lora-targets ['q_proj']: is of adapters"),
        (["--lora-rank", "-1"], "--lora-rank"),
        (["--lora-rank", "8", "--lora-dropout", "1"], "--lora-dropout"),
        (["--lora-rank", "8", "--lora-dropout", "0.1", "--verify-first-step"], "--lora-dropout 0.1, --verify-first-step: with dropout"),
    ],
)
def test_settings_of_adapters(refusal, run, flags, said):
    assert said in refusal(*flags)
    assert run("--lora-rank", "8", "--lora-alpha", "16", "--lora-dropout", "0.1", "--lora-targets", "q_proj").lora_rank == 8


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        (None, (["--lora-rank", "4"], "it holds all weights of a model, not adapters; leave out --lora-rank")),
        ({"rank": 4, "alpha": 8.0}, ([], "it holds adapters alone; go on with --lora-rank 4 --lora-alpha 8")),
        (
            {"rank": 4, "alpha": 8.0},
            (["--lora-rank", "4"], "its adapters are --lora-rank 4 --lora-alpha 8, not --lora-rank 4 --lora-alpha 32"),
        ),
        ({"rank": 4, "alpha": 8.0}, (["--lora-rank", "4", "--lora-alpha", "8"], "")),
    ],
)
def test_a_checkpoint_of_other_adapters_is_refused_before_anything_starts(run, refusal, tmp_path, saved, expected):
    flags, said = expected
    folder = tmp_path / "rollout_000000"
    (folder / "actor").mkdir(parents=True)
    (folder / "actor" / "progress.json").write_text(json.dumps({"rollout_id": 0, "adapters": saved}))
    (folder / "COMPLETE").write_text('{"files": {}}')
    flags = ["--load", str(tmp_path), *flags]
    assert said in refusal(*flags) if said else run(*flags).lora_rank == 4


@pytest.mark.parametrize(("flag", "reason"), [("--resume", "no run of that name"), ("--config", "No such file")])
def test_a_file_that_is_not_there_is_one_problem(flag, reason):
    """What it would have said is missing too, and is not told."""
    with pytest.raises(SettingsError, match=rf"^1 problem in the settings:\n  {flag} nosuch.*{reason}.*$"):
        resolve([flag, "nosuch.toml"])
