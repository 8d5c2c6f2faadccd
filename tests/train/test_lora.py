"""Low-rank adapters: the formula, what is trained and what never changes, and what others get to see of them."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from miles.train.lora import LoraLinear, is_adapter
from miles.train.random_model import ensure_model
from miles.train.trainer import Trainer
from miles.weights.receiver import WeightLoader
from tests.train.rollouts import Store, make_shares, make_trainer, settings
from tests.train.test_trainer import run, same, weights, with_rollout_logprobs_of

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def lora(tiny: str, **changes: Any) -> Any:
    return settings(tiny, **({"lora_rank": 4, "lora_alpha": 8.0, "lr": 5e-3} | changes))


def base_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in weights(trainer).items() if not is_adapter(name)}


def published(trainer: Trainer, version: int) -> dict[str, torch.Tensor]:
    """What an engine has after a publish, compared by checksums."""
    target = {name: torch.zeros(p.shape) for name, p in trainer.model.hf.named_parameters() if not is_adapter(name)}
    loader = WeightLoader(target)
    plan = trainer.plan_publish(version)
    loader.begin(plan, 0)
    for index in range(len(plan.buckets)):
        trainer.send_bucket(index)
        loader.receive(index)
    assert loader.finish() == trainer.end_publish()
    loader.dispose()
    return target


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_forward_and_gradients_are_those_of_the_formula(dropout: float) -> None:
    """In float64: y = W x + b + (alpha / r) B A d(x), and what follows for A, B and x by the chain rule."""
    generator = torch.Generator().manual_seed(0)
    base = nn.Linear(5, 3).double().requires_grad_(False)
    layer = LoraLinear(base, 2, 3.0, dropout, generator).double()
    nn.init.normal_(layer.lora_B, generator=generator)
    x = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    out = torch.randn(7, 3, dtype=torch.float64)
    torch.manual_seed(3)
    mask = nn.functional.dropout(torch.ones(7, 5, dtype=torch.float64), dropout)
    torch.manual_seed(3)
    y = layer(x)
    y.backward(out)
    a, b, seen = layer.lora_A.detach(), layer.lora_B.detach(), x.detach() * mask
    torch.testing.assert_close(y.detach(), x.detach() @ base.weight.T + base.bias + 1.5 * seen @ a.T @ b.T)
    torch.testing.assert_close(layer.lora_A.grad, 1.5 * b.T @ out.T @ seen)
    torch.testing.assert_close(layer.lora_B.grad, 1.5 * out.T @ seen @ a.T)
    torch.testing.assert_close(x.grad, out @ base.weight + 1.5 * (out @ b @ a) * mask)
    assert base.weight.grad is None
    with torch.no_grad():
        torch.testing.assert_close(layer(x), x @ base.weight.T + base.bias + 1.5 * x @ a.T @ b.T)  # no dropout without gradients


def test_gradients_of_a_whole_model_follow_from_those_of_the_merged_one(tiny: str, store: Store) -> None:
    """G the gradient of W + s B A: that of A is s B^T G, that of B is s G A^T. Packed, with shared beginnings, in float64."""
    adapted = make_trainer(lora(tiny, max_grad_norm=1e9), store)
    run(adapted, range(1))
    plain = make_trainer(settings(tiny, max_grad_norm=1e9), store)
    full = published(adapted, 1)
    with torch.no_grad():
        for name, parameter in plain.model.hf.named_parameters():
            parameter.copy_(full[name])
    found: list[dict[str, torch.Tensor]] = []
    for trainer in (plain, adapted):
        trainer.model.double()
        named = {name: p for name, p in trainer.model.hf.named_parameters() if p.requires_grad}
        trainer.optimizer.step = lambda named=named: found.append({name: p.grad.clone() for name, p in named.items()})  # type: ignore[method-assign]
        trainer.train(1, store.put(make_shares(5)[0]))
    whole, own = found
    layers = {name: module for name, module in adapted.model.hf.named_modules() if isinstance(module, LoraLinear)}
    assert len(layers) == 7 * 4
    for name, layer in layers.items():
        gradient = whole[f"{name}.weight"]
        scale = float(gradient.abs().max())
        for got, want in (
            (own[f"{name}.lora_A"], 2.0 * layer.lora_B.detach().T @ gradient),
            (own[f"{name}.lora_B"], 2.0 * gradient @ layer.lora_A.detach().T),
        ):
            assert float((got - want).abs().max()) < 1e-5 * scale, name


def test_only_adapters_are_trained_and_have_gradients_and_moments(tiny: str, store: Store) -> None:
    trainer = make_trainer(lora(tiny), store)
    before = weights(trainer)
    run(trainer, range(2))
    after = weights(trainer)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if is_adapter(name)}
    assert len(changed) == 2 * 7 * 4
    held = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    assert sum(p.numel() for p in held) == sum(before[name].numel() for name in changed)
    assert sum(p.numel() for p in held) < 0.1 * sum(tensor.numel() for tensor in before.values())


def test_a_hundred_publishes_are_merged_and_leave_the_base_as_it_was(tiny: str, store: Store) -> None:
    trainer = make_trainer(lora(tiny), store)
    before = base_of(trainer)
    assert all(torch.equal(tensor, before[f"hf.{name}"]) for name, tensor in published(trainer, 0).items())
    run(trainer, range(2))
    first = published(trainer, 1)
    for name, tensor in first.items():
        layer = trainer.model.hf.get_submodule(name.removesuffix(".weight"))
        wanted = before[f"hf.{name}"].double()
        if isinstance(layer, LoraLinear):
            wanted = wanted + 8.0 / 4 * layer.lora_B.double() @ layer.lora_A.double()
        torch.testing.assert_close(tensor.double(), wanted, atol=1e-6, rtol=1e-6)
    for version in range(2, 100):
        trainer.plan_publish(version)
        for index in range(len(trainer.publisher._publisher.buckets)):
            trainer.send_bucket(index)
        trainer.end_publish()
    assert same(base_of(trainer), before)
    assert same(published(trainer, 100), first)
    trainer.dispose()


def test_an_engine_with_the_merged_weights_gives_the_trainers_logprobs(tiny: str, store: Store) -> None:
    trainer = make_trainer(lora(tiny, use_tis=True), store)
    run(trainer, range(3))
    merged = published(trainer, 3)
    engine = make_trainer(settings(tiny), store)
    with torch.no_grad():
        for name, parameter in engine.model.hf.named_parameters():
            parameter.copy_(merged[name])
    share = with_rollout_logprobs_of(engine, make_shares(7)[0])
    (metrics,) = trainer.train(3, store.put(share)).metrics_per_step
    assert metrics["train/train_rollout_logprob_abs_diff"] < 1e-6
    assert metrics["train/train_rollout_logprob_abs_diff_max"] < 2e-5
    trainer.dispose()


def test_the_reference_is_the_base_itself(tiny: str, store: Store) -> None:
    trainer = make_trainer(lora(tiny, kl_loss_coef=0.5), store)
    metrics = run(trainer, range(3))
    assert metrics[0]["train/kl"] == 0.0
    assert metrics[-1]["train/kl"] > 1e-4
    assert trainer.frozen.loaded == {}, "no second model in memory"
    share = make_shares(9)[0]
    columns, steps = trainer._prepare(share, None)
    base = make_trainer(settings(tiny), store)
    assert columns.ref_logprobs is not None
    assert torch.equal(columns.ref_logprobs, base._evaluate(base.model, steps, columns))
    assert not torch.equal(columns.ref_logprobs, trainer._evaluate(trainer.model, steps, columns))
    other = make_trainer(lora(tiny, kl_loss_coef=0.5, ref_checkpoint=str(ensure_model("random:tiny", 1))), store)
    assert run(other, range(1))[0]["train/kl"] > 1e-4
    assert set(other.frozen.loaded) == {"reference"}


def test_kept_weights_are_the_adapters_of_the_last_publish(tiny: str, store: Store) -> None:
    trainer = make_trainer(lora(tiny, keep_old_actor=True), store)
    run(trainer, range(1))
    assert trainer.published is not None
    assert set(trainer.published.kept) == {name for name in weights(trainer) if is_adapter(name)}
    sent = published(trainer, 1)
    run(trainer, range(1, 2))
    assert same(published(trainer, 1), sent), "the same version once more"
    assert not same(published(trainer, 2), sent)
    trainer.offload()
    trainer.onload()
    trainer.dispose()


def saved(trainer: Trainer, folder: Path, force_sync: bool = True) -> None:
    trainer.save(1, str(folder / "rollout_000001"), force_sync)
    asyncio.run(trainer.wait_for_save())
    (folder / "rollout_000001" / "COMPLETE").write_text('{"files": {}}')


def test_a_resumed_run_goes_on_bit_for_bit_from_adapters_alone(tiny: str, store: Store, tmp_path: Path) -> None:
    args = lora(tiny, lr_schedule="cosine", weight_decay=0.1, global_batch_size=8, lora_dropout=0.1)
    whole = make_trainer(args, store)
    run(whole, range(2))
    whole.save(1, str(tmp_path / "rollout_000001"), force_sync=False)
    after = run(whole, range(2, 4))
    asyncio.run(whole.wait_for_save())
    (tmp_path / "rollout_000001" / "COMPLETE").write_text('{"files": {}}')
    kept = set(FileSystemReader(tmp_path / "rollout_000001" / "actor").read_metadata().state_dict_metadata)
    trained = [name for name in weights(whole) if is_adapter(name)]
    assert kept == {f"{part}.{name}" for part in ("model", "exp_avg", "exp_avg_sq") for name in trained} | {"random.cpu"}
    torch.rand(5)
    resumed = make_trainer(args.model_copy(update={"load": str(tmp_path)}), store)
    again = run(resumed, range(2, 4))
    assert same(weights(whole), weights(resumed))
    for mine, other in zip(after, again, strict=True):
        assert {k: v for k, v in mine.items() if "perf" not in k} == {k: v for k, v in other.items() if "perf" not in k}


def test_what_does_not_fit_a_checkpoint_is_refused(tiny: str, store: Store, tmp_path: Path) -> None:
    saved(make_trainer(lora(tiny), store), tmp_path / "adapters")
    saved(make_trainer(settings(tiny), store), tmp_path / "full")
    other = tmp_path / "other"
    shutil.copytree(tiny, other)
    model = AutoModelForCausalLM.from_pretrained(tiny)
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-3
    model.save_pretrained(other)
    ours = {"load": str(tmp_path / "adapters")}
    for args, said in (
        (lora(tiny, **ours, lora_rank=8), r"its adapters are --lora-rank 4 --lora-alpha 8, not --lora-rank 8"),
        (lora(tiny, **ours, lora_alpha=9.0), r"not --lora-rank 4 --lora-alpha 9"),
        (lora(tiny, **ours, lora_targets=["q_proj", "v_proj"]), r"--lora-targets: 20 adapters .* model.layers.0.mlp.down_proj is only in"),
        (lora(str(other), **ours), rf"--hf-checkpoint: {other} \(checksum \w+\) is not the base .* trained on: {tiny} \(checksum"),
        (settings(tiny, **ours), r"it holds adapters alone; go on with --lora-rank 4 --lora-alpha 8"),
        (lora(tiny, load=str(tmp_path / "full")), r"it holds all weights of a model, not adapters"),
    ):
        with pytest.raises(ValueError, match=said):
            make_trainer(args, store)
    make_trainer(lora(tiny, **ours), store)


def test_unknown_targets_are_told_with_the_nearest(tiny: str, store: Store) -> None:
    with pytest.raises(ValueError, match=r"--lora-targets q_prj: no linear layer .* did you mean q_proj.*\? there are q_proj, k_proj"):
        make_trainer(lora(tiny, lora_targets=["up_proj", "q_prj"]), store)
    with pytest.raises(ValueError, match=r"--lora-targets lm_head: .* there are " + ", ".join(LAYERS)):
        make_trainer(lora(tiny, lora_targets=["lm_head"]), store)
    chosen = make_trainer(lora(tiny, lora_targets=["self_attn.q_proj", "mlp.up_proj"]), store)
    adapted = {name.rpartition(".")[0] for name in weights(chosen) if is_adapter(name)}
    assert adapted == {f"hf.model.layers.{n}.{layer}" for n in range(4) for layer in ("self_attn.q_proj", "mlp.up_proj")}


def test_dropout_is_the_same_every_time_and_only_in_training(tiny: str, store: Store) -> None:
    runs = []
    for dropout in (0.3, 0.3, 0.0):
        trainer = make_trainer(lora(tiny, lora_dropout=dropout, deterministic=True), store)
        run(trainer, range(2))
        runs.append(weights(trainer))
    torch.use_deterministic_algorithms(False)
    assert same(runs[0], runs[1])
    assert not same(runs[0], runs[2])


def test_a_critic_has_adapters_and_a_whole_head(tiny: str, store: Store) -> None:
    args = lora(tiny, advantage_estimator="ppo", critic_lr=5e-3, value_clip=10.0, use_rollout_logprobs=True)
    critic = make_trainer(args, store, "critic")
    before = weights(critic)
    share = store.put(make_shares(0)[0])
    losses = [critic.train(n, share).metrics_per_step[0]["train/value_loss"] for n in range(8)]
    assert losses[-1] < 0.5 * losses[0]
    changed = {name for name, tensor in weights(critic).items() if not torch.equal(before[name], tensor)}
    assert changed == {name for name in before if is_adapter(name) or name.startswith("value_head")}


def test_peft_puts_the_exported_adapter_on_the_base_and_merged_weights_agree(tiny: str, store: Store, tmp_path: Path) -> None:
    from peft import PeftModel

    trainer = make_trainer(lora(tiny, save_hf=True), store)
    run(trainer, range(2))
    saved(trainer, tmp_path)
    exported = tmp_path / "rollout_000001" / "hf"
    files = asyncio.run(trainer.wait_for_save())
    assert {"hf/model.safetensors", "hf/adapter/adapter_model.safetensors", "hf/adapter/adapter_config.json"} <= files.keys()
    config = json.loads((exported / "adapter" / "adapter_config.json").read_text())
    assert (config["target_modules"], config["base_model_name_or_path"]) == (LAYERS, tiny)
    ids = torch.randint(3, 500, (2, 9), generator=torch.Generator().manual_seed(0))
    base = AutoModelForCausalLM.from_pretrained(tiny)
    with torch.no_grad():
        want = base(ids).logits
        adapted = PeftModel.from_pretrained(base, exported / "adapter")
        theirs = adapted(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(exported)(ids).logits
        ours = trainer.model.hf(ids).logits
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(merged, ours, atol=1e-5, rtol=1e-5)
    assert float((ours - want).abs().max()) > 1e-2
    with safe_open(exported / "model.safetensors", "pt") as file:
        assert not [name for name in file.keys() if "lora" in name]  # noqa: SIM118
