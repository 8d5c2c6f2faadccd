"""The acceptance runs: every kind of run ends well, with the steps it was asked for."""

import json
from pathlib import Path

import pytest

import train
from miles.ray.worker_process import free_port

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("default")  # as users run it


def steps(run):
    return [rollout for rollout, _ in run.series("train/policy_loss")]


def test_plain(drive):
    run = drive("plain")
    assert steps(run) == [0, 1, 2, 3]
    assert [lag for _, lag in run.series("train/weight_lag_max")] == [0, 1, 1, 1]
    first = run.series("train/train_rollout_logprob_abs_diff")[0][1]
    assert first < 1e-5
    assert {"config.toml", "metrics.jsonl", "samples", "logs", "checkpoints", "timeline.json", "ledger.jsonl"} <= {
        path.name for path in run.folder.iterdir()
    }
    for name in ("rollout/reward", "train/grad_norm", "perf/step_seconds", "perf/overlap_efficiency", "perf/publish_seconds"):
        assert len(run.series(name)) == 4, name
    json.loads((run.folder / "timeline.json").read_text())


def test_fully_async(drive):
    run = drive("fully", "--fully-async", "--num-rollout", 5)
    assert steps(run) == [0, 1, 2, 3, 4]
    groups = [group for rollout in run.trained_groups().values() for group in rollout]
    assert len(groups) == len(set(groups)) == 20
    assert max(lag for _, lag in run.series("rollout/weight_lag_max")) <= 2


def test_critic(drive):
    run = drive("critic", "--advantage-estimator", "ppo", "--use-tis")
    assert steps(run) == [0, 1, 2, 3]
    assert len(run.series("train/value_loss")) == 4


def test_critic_alone_first(drive):
    run = drive("warm", "--advantage-estimator", "ppo", "--use-tis", "--num-critic-only-steps", 1, "--offload-train", "--save-interval", 2)
    assert steps(run) == [1, 2, 3]
    assert [rollout for rollout, _ in run.series("train/value_loss")] == [0, 1, 2, 3]
    assert sorted(path.name for path in (run.folder / "checkpoints").iterdir()) == ["latest", "rollout_000001", "rollout_000003"]


def test_eval(drive):
    run = drive("eval", "--eval-interval", 2)
    points = [(line["rollout_id"], line["step"]) for line in run.lines if "eval/sums/reward" in line]
    assert points == [(0, 0), (1, 2), (3, 4)]
    assert all(count == 8 for _, count in run.series("eval/sums/count"))


@pytest.mark.case("C77")
def test_eval_beside_generation_that_never_stops(drive):
    """A set of 32 answers takes longer than a training step: no answer is cut off, a point has one version, and nothing is mixed."""
    run = drive("beside", "--fully-async", "--num-rollout", 5, "--eval-interval", 2, "--eval-samples-per-prompt", 4, "--save-samples", 99)
    assert [rollout for rollout, _ in run.series("eval/sums/count")] == [0, 1, 3, 4]
    assert [count for _, count in run.series("eval/sums/count")] == [8] * 4
    assert [failed for _, failed in run.series("eval/sums/failed")] == [0] * 4
    logs = "".join(path.read_text() for path in (run.folder / "logs").glob("*"))
    assert "several weight versions" not in logs
    assert "aborted" not in logs
    assert steps(run) == [0, 1, 2, 3, 4]
    held_out = {json.loads(line)["prompt"] for line in (ROOT / "recipes" / "tiny" / "held_out.jsonl").read_text().splitlines()}
    samples = [line for path in (run.folder / "samples").glob("rollout_*") for line in path.read_text().splitlines()]
    assert samples
    assert not [line for line in samples if any(prompt in json.loads(line)["prompt"] for prompt in held_out)]


@pytest.mark.case("C55")
@pytest.mark.parametrize("total", [1, 2, 3])
@pytest.mark.parametrize("flags", [["--update-weights-interval", 1], ["--update-weights-interval", 4], ["--fully-async"]])
def test_short_runs(drive, total, flags):
    run = drive("short", "--num-rollout", total, "--eval-interval", 2, "--save-interval", 2, *flags)
    assert steps(run) == list(range(total))
    assert len(run.series("rollout/reward")) == total
    assert (run.folder / "checkpoints" / f"rollout_{total - 1:06d}" / "COMPLETE").exists()


def test_lag_law(drive):
    """Batch r + 1 lags (r mod k) + 1 rollouts behind its weights; the first one does not."""
    run = drive("lag", "--num-rollout", 6, "--update-weights-interval", 3)
    versions = [version for _, version in run.series("rollout/weight_version")]
    assert versions == [1, 1, 1, 1, 2, 2]


def test_epochs_give_the_number_of_rollouts(drive, tmp_path):
    config = tmp_path / "epochs.toml"
    rows = [{"prompt": f"{n} + 1", "label": str(n + 1)} for n in range(9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config.write_text(f'[data]\nprompt_data = "{tmp_path}/rows.jsonl"\nnum_epoch = 2\n[checkpoint]\nsave_interval = 100\n')
    run = drive("epochs", "--config", config)
    # The recipe says four rollouts, as floor(9 / 4) x 2 does.
    assert steps(run) == [0, 1, 2, 3]


def test_stops_early_when_asked(drive, caplog):
    """And a mask that leaves nothing to learn from is named, once."""
    run = drive("debug", "--num-rollout", 50, "--debug-exit-after-rollout", 2, "--mask-level", "token", "--mask-high", 1e-6)
    assert steps(run) == [0, 1]
    assert [value for _, value in run.series("train/rejected")] == [1.0, 1.0]
    assert len([text for text in caplog.messages if "--mask-level rejected all of their tokens" in text]) == 1


def test_sentinel_saves_the_current_rollout(drive, tmp_path):
    (tmp_path / "please").touch()
    run = drive("sentinel", "--save-trigger-sentinel", tmp_path / "please", "--num-rollout", 2)
    assert not (tmp_path / "please").exists()
    assert [path.name for path in (run.folder / "checkpoints").glob("rollout_*")] == ["rollout_000000"]
    assert (run.folder / "checkpoints" / "rollout_000000" / "COMPLETE").exists()


def test_only_the_newest_checkpoints_are_kept(drive):
    run = drive("kept", "--num-rollout", 4, "--save-interval", 1, "--keep-checkpoints", 2, "--save-hf")
    found = sorted(path.name for path in (run.folder / "checkpoints").glob("rollout_*"))
    assert found == ["rollout_000002", "rollout_000003"]
    assert (run.folder / "checkpoints" / "latest").read_text().strip() == "rollout_000003"
    assert (run.folder / "checkpoints" / "rollout_000003" / "hf" / "config.json").exists()


def test_synchronous_and_colocated(drive):
    run = drive("sync", "--colocate", "--offload-train", "--save-interval", 2, "--eval-interval", 2, driver=train)
    assert steps(run) == [0, 1, 2, 3]
    assert [lag for _, lag in run.series("train/weight_lag_max")] == [0, 0, 0, 0]
    assert all(difference < 1e-5 for _, difference in run.series("train/train_rollout_logprob_abs_diff"))


def test_first_publish_is_what_the_engines_loaded(drive):
    run = drive("equal", "--check-weight-update-equal", "--num-rollout", 1)
    assert steps(run) == [0]


def test_several_optimizer_steps_of_a_rollout(drive):
    run = drive("steps", "--global-batch-size", 8, "--num-rollout", 2)
    assert [line["step"] for line in run.lines if "train/policy_loss" in line] == [1, 2, 3, 4]


def test_control_api_and_healer_come_and_go_with_the_run(drive):
    port = free_port()
    run = drive("api", "--api-server-port", port, "--mini-ft-controller", "--num-rollout", 2)
    assert steps(run) == [0, 1]
    again = drive("again", "--api-server-port", port, "--num-rollout", 1)
    assert steps(again) == [0]


def test_snapshots_are_evaluated_beside_training(drive):
    run = drive(
        "snapshots", "--eval-mode", "snapshot", "--eval-function", "tests.e2e.faulty.count_files", "--eval-interval", 1, "--num-rollout", 3
    )
    points = [(line["rollout_id"], line["step"]) for line in run.lines if "eval/files" in line]
    assert sorted(points) == [(0, 0), (0, 1), (1, 2), (2, 3)]
    assert sorted(path.name for path in (run.folder / "eval_hf").iterdir()) == ["rollout_000001", "rollout_000002"]


def test_adapters_learn_and_engines_have_what_is_trained(drive):
    """On policy, so every step's difference of log-probs is rounding: merged in the engine, beside the base in the trainer."""
    flags = ["--lora-rank", 8, "--lr", 1e-2, "--num-rollout", 12, "--n-samples-per-prompt", 8, "--kl-loss-coef", 1e-4]
    run = drive("lora", *flags, "--colocate", "--offload-train", "--save-interval", 12, driver=train)
    rewards = [reward for _, reward in run.series("rollout/reward")]
    assert sum(rewards[-3:]) > 4 * sum(rewards[:3])
    assert max(gap for _, gap in run.series("train/train_rollout_logprob_abs_diff")) < 2e-6
    divergence = [kl for _, kl in run.series("train/kl")]
    assert divergence[0] == 0.0
    assert divergence[-1] > 0.05
    assert any(name.endswith("lora_B") for name in run.weights())
    assert not any(name.endswith("q_proj.weight") for name in run.weights())
