"""One rank: what its steps do, what survives a checkpoint, what does not change the numbers."""

import asyncio
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from miles.data.rollout_data import select, split
from miles.train.checkpoint import newest_complete
from miles.train.mesh import Ranks
from miles.train.targets import fill_advantages, token_columns
from miles.train.trainer import Trainer
from miles.types import TrainShare
from tests.train.rollouts import Store, make_data, make_shares, make_trainer, settings


def run(trainer: Trainer, seeds: range, **shape: Any) -> list[dict[str, float]]:
    metrics = []
    for seed in seeds:
        share = make_shares(seed, samples_per_step=trainer.args.samples_per_step, **shape)[0]
        metrics += trainer.train(seed, trainer.store.put(share)).metrics_per_step
    return metrics


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def with_rollout_logprobs_of(trainer: Trainer, share: TrainShare) -> TrainShare:
    """The share as an engine with the trainer's own weights would have sampled it."""
    columns, steps = trainer._prepare(share, None)
    share.data.rollout_logprobs = trainer._evaluate(trainer.model, steps, columns).numpy()
    return share


def gradients(trainer: Trainer, share: TrainShare) -> tuple[list[torch.Tensor], dict[str, float]]:
    """The gradients that the optimizer would have used, and the step's metrics."""
    found: list[torch.Tensor] = []
    trainer.optimizer.step = lambda: found.extend(p.grad.clone() for p in trainer.model.parameters())  # type: ignore[method-assign]
    return found, trainer.train(0, trainer.store.put(share)).metrics_per_step[0]


@pytest.mark.parametrize("force_sync", [True, False])
def test_a_resumed_run_goes_on_bit_for_bit(tiny: str, store: Store, tmp_path: Path, force_sync: bool) -> None:
    args = settings(tiny, lr_schedule="cosine", lr_warmup_steps=2, weight_decay=0.1, global_batch_size=8)
    whole = make_trainer(args, store)
    run(whole, range(1))
    whole.save(0, str(tmp_path / "rollout_000000"), force_sync)  # the later one is copied into the same memory
    run(whole, range(1, 2))
    whole.save(1, str(tmp_path / "rollout_000001"), force_sync)
    after = run(whole, range(2, 4))
    asyncio.run(whole.wait_for_save())
    (tmp_path / "rollout_000001" / "COMPLETE").write_text('{"files": {}}')
    torch.rand(7)  # the random state is restored too
    resumed = Trainer(args.model_copy(update={"load": str(tmp_path)}), "actor", 0, 1, store)
    assert resumed.init("127.0.0.1", 0) == 1
    again = run(resumed, range(2, 4))
    assert resumed.step == whole.step == 8
    assert same(weights(whole), weights(resumed))
    for mine, other in zip(after, again, strict=True):
        assert {k: v for k, v in mine.items() if "perf" not in k} == {k: v for k, v in other.items() if "perf" not in k}


def test_a_save_before_the_first_step_and_a_broken_one(tiny: str, store: Store, tmp_path: Path) -> None:
    trainer = make_trainer(settings(tiny), store)
    trainer.save(0, str(tmp_path / "rollout_000000"), True)
    with pytest.raises(ValueError, match="--load: no complete checkpoint"):
        newest_complete(str(tmp_path), "actor")
    (tmp_path / "rollout_000000" / "COMPLETE").write_text('{"files": {}}')
    (tmp_path / "rollout_000001" / "actor").mkdir(parents=True)
    assert newest_complete(str(tmp_path), "actor") == tmp_path / "rollout_000000" / "actor"
    resumed = make_trainer(settings(tiny, load=str(tmp_path / "rollout_000000")), store)
    run(trainer, range(1))
    run(resumed, range(1))
    assert same(weights(trainer), weights(resumed))
    shutil.copytree(tmp_path / "rollout_000000" / "actor", tmp_path / "rollout_000000" / "critic")
    critic = Trainer(settings(tiny, load=str(tmp_path / "rollout_000000"), advantage_estimator="ppo"), "critic", 0, 1, store)
    with pytest.raises(ValueError, match=r"--load: .*rollout_000000/critic is of another model: model\..* is not there"):
        critic.init("127.0.0.1", 0)
    critic.dispose()


def test_a_failed_save_is_told_by_the_next_call(tiny: str, store: Store, tmp_path: Path) -> None:
    trainer = make_trainer(settings(tiny), store)
    trainer.save(0, str(tmp_path), False)
    asyncio.run(trainer.wait_for_save())
    (tmp_path / "file").touch()
    with pytest.raises((OSError, NotADirectoryError)):
        trainer.save(1, str(tmp_path / "file"), True)


@hypothesis_settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1000), max_tokens=st.integers(8, 300), share_prompts=st.booleans(), order=st.randoms(use_true_random=False))
def test_micro_batches_and_order_do_not_matter(tiny: str, seed: int, max_tokens: int, share_prompts: bool, order: Any) -> None:
    data = make_data(seed)
    shuffled = list(range(data.num_samples))
    order.shuffle(shuffled)
    results = []
    for columns, changes in (
        (data, {}),
        (select(data, np.array(shuffled)), {"max_tokens_per_micro_batch": max_tokens, "share_prompts": share_prompts}),
    ):
        trainer = make_trainer(settings(tiny, max_grad_norm=1e9, loss_aggregation="sequence_mean", **changes), Store())
        results.append(gradients(trainer, split(columns, 1, 16, 0, 1)[0]))
    (want, metrics), (got, other) = results
    assert metrics["train/loss"] == pytest.approx(other["train/loss"], abs=1e-6)
    assert metrics["train/grad_norm"] == pytest.approx(other["train/grad_norm"], rel=1e-4, abs=1e-7)
    scale = max(float(g.abs().max()) for g in want)
    assert all((a - b).abs().max() <= 1e-5 * scale + 1e-9 for a, b in zip(want, got, strict=True))


def test_rollout_logprobs_of_the_same_weights_differ_by_rounding_only(tiny: str, store: Store) -> None:
    trainer = make_trainer(settings(tiny, temperature=0.8, kl_loss_coef=0.1, use_tis=True), store)
    share = with_rollout_logprobs_of(trainer, make_shares(0)[0])
    (metrics,) = trainer.train(0, store.put(share)).metrics_per_step
    assert metrics["train/train_rollout_logprob_abs_diff"] < 1e-6
    assert metrics["train/train_rollout_logprob_abs_diff_max"] < 1e-5
    assert metrics["train/tis_weight"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["train/kl"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["train/ratio_mean"] == pytest.approx(1.0)


def test_samples_without_gradient_are_not_computed_but_one_always_is(tiny: str, store: Store) -> None:
    trainer = make_trainer(settings(tiny), store)
    share = make_shares(0)[0]
    share.batch.rewards[:12] = 1.0  # three of four groups alike
    (metrics,) = trainer.train(0, store.put(share)).metrics_per_step
    assert 0 < metrics["train/num_tokens"] <= share.batch.num_trained_tokens[12:].sum()
    share.batch.rewards[:] = 1.0
    before = weights(trainer)
    trainer.optimizer.state.clear()
    (metrics,) = trainer.train(1, store.put(share)).metrics_per_step
    assert metrics["train/grad_norm"] == 0.0
    assert metrics["train/num_tokens"] == share.batch.num_trained_tokens[0]
    assert math.isfinite(metrics["train/train_rollout_logprob_abs_diff"])
    assert same(before, weights(trainer))


@pytest.mark.case("C38")
def test_unscored_samples_are_as_if_they_were_not_there(tiny: str, store: Store) -> None:
    data = make_data(4)
    data.rewards[[2, 5]] = np.nan
    kept = np.array([place for place in range(16) if place not in (2, 5)])
    results = []
    for columns in (data, select(data, kept)):
        trainer = make_trainer(settings(tiny, kl_loss_coef=0.1), store)
        share = split(columns, 1, 16, 0, 1)[0]
        results.append((trainer.train(0, store.put(share)).metrics_per_step[0], weights(trainer)))
    assert results[0][0]["train/loss"] == pytest.approx(results[1][0]["train/loss"], abs=1e-7)
    assert results[0][0]["train/num_tokens"] == results[1][0]["train/num_tokens"]
    assert distance(results[0][1], results[1][1]) < 1e-5


def test_kept_old_actor_is_the_base_until_the_next_publish(tiny: str, store: Store) -> None:
    trainer = make_trainer(settings(tiny, keep_old_actor=True), store)
    first, second = run(trainer, range(1)), run(trainer, range(1))
    assert first[0]["train/ratio_mean"] == pytest.approx(1.0)
    assert second[0]["train/ratio_mean"] != pytest.approx(1.0, abs=1e-4)
    plan = trainer.plan_publish(1)
    for index in range(len(plan.buckets)):
        trainer.send_bucket(index)
    sums = trainer.end_publish()
    assert sums == trainer.weights_checksum()
    assert set(sums) == {name.removeprefix("hf.") for name, _ in trainer.model.named_parameters()}
    assert run(trainer, range(1))[0]["train/ratio_mean"] == pytest.approx(1.0)
    trainer.dispose()
    trainer.dispose()


def test_later_steps_of_a_rollout_see_the_policy_from_before_the_first(tiny: str, store: Store) -> None:
    metrics = run(make_trainer(settings(tiny, global_batch_size=8), store), range(1))
    assert metrics[0]["train/ratio_mean"] == pytest.approx(1.0)
    assert metrics[1]["train/ratio_mean"] != pytest.approx(1.0, abs=1e-6)
    assert metrics[1]["train/clip_fraction"] >= 0.0


@pytest.mark.case("C40")
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_weights_and_moments_are_those_of_each_step_over_all_ranks(tiny: str, aggregation: Any) -> None:
    args = settings(tiny, advantage_estimator="reinforce_plus_plus", loss_aggregation=aggregation, global_batch_size=8)
    weights, advantages = [0.0, 0.0], [np.zeros(0)] * 2
    for ranks in (1, 2):
        for share in make_shares(0, ranks=ranks, samples_per_step=8):
            columns = token_columns(share, args, torch.device("cpu"))
            step_of = np.repeat(share.batch.step_of[share.positions], np.diff(share.data.offsets))
            for step in range(2):
                weights[step] += float(columns.weights.numpy()[step_of == step].sum())
            if ranks == 1:
                fill_advantages(columns, share, args, Ranks(0, 1, torch.device("cpu")))
                for step in range(2):
                    advantages[step] = columns.advantages.numpy()[columns.trained & (step_of == step)]
    assert weights == pytest.approx([2.0, 2.0]), "1 for each step, by one rank as by two together"
    for own in advantages:
        assert (own.mean(), own.std()) == pytest.approx((0.0, 1.0), abs=1e-5)


@pytest.mark.case("C46")
def test_tis_at_ratio_one_changes_nothing(tiny: str, store: Store) -> None:
    results = []
    for use_tis in (False, True):
        trainer = make_trainer(settings(tiny, use_tis=use_tis), store)
        share = with_rollout_logprobs_of(trainer, make_shares(0)[0])
        trainer.train(0, store.put(share))
        results.append(weights(trainer))
    assert distance(*results) < 1e-5


def test_the_reference_comes_only_when_a_coefficient_asks_for_it(tiny: str, store: Store) -> None:
    plain, with_kl = make_trainer(settings(tiny), store), make_trainer(settings(tiny, kl_loss_coef=0.5), store)
    assert "train/kl" not in run(plain, range(1))[0]
    assert plain.frozen.loaded == {}
    metrics = run(with_kl, range(3))
    assert metrics[0]["train/kl"] == pytest.approx(0.0, abs=1e-9)
    assert metrics[-1]["train/kl"] > 1e-4
    assert metrics[-1]["train/loss"] > metrics[-1]["train/policy_loss"]


def test_a_rewarded_token_becomes_likelier(tiny: str, store: Store) -> None:
    trainer = make_trainer(settings(tiny, lr=3e-3), store)
    share = make_shares(0)[0]
    best = int(np.argmax(share.data.rewards))
    start, end = share.data.offsets[best], share.data.offsets[best + 1]
    ids = torch.tensor(share.data.token_ids[start:end], dtype=torch.long)[None]

    def likelihood() -> float:
        with torch.no_grad():
            log_p = trainer.model.hf(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        return float((log_p * torch.tensor(share.data.loss_mask[start + 1 : end])).sum())

    before = likelihood()
    for rollout_id in range(5):
        trainer.train(rollout_id, store.put(share))
    assert likelihood() > before + 1.0


def test_critic_learns_the_rewards_and_the_actor_uses_its_values(tiny: str, store: Store) -> None:
    args = settings(tiny, advantage_estimator="ppo", critic_lr=1e-3, value_clip=10.0, use_rollout_logprobs=True, kl_coef=0.01)
    critic, actor = make_trainer(args, store, "critic"), make_trainer(args, store)
    share = store.put(make_shares(0)[0])
    losses, explained = [], []
    for rollout_id in range(8):
        result = critic.train(rollout_id, share)
        assert result.values is not None
        losses.append(result.metrics_per_step[0]["train/value_loss"])
        explained.append(result.metrics_per_step[0]["train/value_explained_variance"])
        (metrics,) = actor.train(rollout_id, share, result.values).metrics_per_step
        assert math.isfinite(metrics["train/loss"])
    values = store.get(result.values)
    data = make_shares(0)[0].data
    assert values.dtype == np.float32
    assert values.shape == data.token_ids.shape
    assert not values[data.loss_mask == 0].any()
    assert losses[-1] < 0.5 * losses[0]
    assert explained[-1] > explained[0]
    with pytest.raises(ValueError, match="critic's values"):
        actor.train(0, share)


def test_offload_and_onload_change_nothing(tiny: str, store: Store) -> None:
    moved, plain = (make_trainer(settings(tiny, keep_old_actor=True, kl_loss_coef=0.1), store) for _ in range(2))
    for trainer in (moved, plain):
        run(trainer, range(1))
    for verb in (moved.onload, moved.offload, moved.offload, moved.onload, moved.onload):
        verb()
    for trainer in (moved, plain):
        run(trainer, range(1, 2))
    assert same(weights(moved), weights(plain))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_loads_with_transformers(tiny: str, store: Store, tmp_path: Path, dtype: str) -> None:
    trainer = make_trainer(settings(tiny), store)
    run(trainer, range(1))
    trainer.dtype = trainer.exporter.dtype = getattr(torch, dtype)
    trainer.export_hf(str(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == trainer.dtype
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    ours = {name.removeprefix("hf."): tensor.to(trainer.dtype) for name, tensor in weights(trainer).items()}
    assert same(dict(model.named_parameters()), ours)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == AutoTokenizer.from_pretrained(tiny).chat_template


def test_a_gradient_that_is_no_number_leaves_the_weights_alone(tiny: str, store: Store) -> None:
    trainer = make_trainer(settings(tiny), store)
    share = make_shares(0)[0]
    before = weights(trainer)
    hook = trainer.model.hf.lm_head.weight.register_hook(lambda grad: grad * float("nan"))
    (metrics,) = trainer.train(0, store.put(share)).metrics_per_step
    hook.remove()
    assert not math.isfinite(metrics["train/grad_norm"])
    assert same(before, weights(trainer))
