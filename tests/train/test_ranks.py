"""Two real ranks over gloo give what one gives."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from miles.train.trainer import Trainer
from tests.train.rollouts import Store, make_shares, make_trainer, settings
from tests.train.two_ranks import GRPO, LORA, PPO

ROOT = Path(__file__).parent.parent.parent


def one_rank(model: str, store: Store, **changes: Any) -> Trainer:
    return make_trainer(settings(model, **(GRPO | {"num_trainers": 1} | changes)), store)


def train(trainer: Trainer, store: Store, seeds: range) -> list[Any]:
    shares = [make_shares(seed, samples_per_step=trainer.args.samples_per_step)[0] for seed in seeds]
    return [trainer.train(seed, store.put(share)).metrics_per_step for seed, share in zip(seeds, shares, strict=True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def alone(tiny: str, folder: Path) -> dict[str, Any]:
    """The same steps on one rank, with a checkpoint after two rollouts."""
    store = Store()
    trainer = one_rank(tiny, store)
    metrics = train(trainer, store, range(2))
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.save(1, str(folder / "from_one"), force_sync=True)
    (folder / "from_one" / "COMPLETE").touch()
    trainer.version = 1  # the others have published by then
    after = train(trainer, store, range(2, 3))
    adapters = one_rank(tiny, store, **LORA | {"num_trainers": 1})
    steps = train(adapters, store, range(1))
    adapters.save(0, str(folder / "lora_from_one"), force_sync=True)
    (folder / "lora_from_one" / "COMPLETE").touch()
    lora = {"metrics": steps + train(adapters, store, range(1, 2)), "weights": dict(adapters.model.named_parameters())}
    return {
        "lora": lora,
        "metrics": metrics,
        "weights": weights,
        "next": after,
        "weights_next": dict(trainer.model.named_parameters()),
    }


@pytest.fixture(scope="module")
def together(alone: dict[str, Any], tiny: str, folder: Path) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tests.train.two_ranks"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([*command, str(rank), str(port), str(folder), tiny], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=240)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    return torch.load(folder / "results.pt", weights_only=False)


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    assert list(a) == list(b)
    for name, tensor in a.items():
        assert (tensor - b[name]).abs().max() < tolerance, name


@pytest.mark.case("C40")
def test_gradient_is_the_global_token_mean_under_any_split(together: dict[str, Any]) -> None:
    assert set(together["scalar"]) == {"one-1", "one-2", "three-1", "three-2"}
    for gradient, norm in together["scalar"].values():
        assert gradient == pytest.approx(0.2, abs=1e-7)
        assert norm == pytest.approx(0.2, abs=1e-7)


@pytest.mark.case("C40")
def test_two_ranks_train_the_same_weights_as_one(alone: dict[str, Any], together: dict[str, Any]) -> None:
    close(alone["weights"], together["weights"])
    close(alone["weights_next"], together["weights_next"])


def test_metrics_are_global(alone: dict[str, Any], together: dict[str, Any]) -> None:
    for ours, theirs in zip(alone["metrics"] + alone["next"], together["metrics"] + together["next"], strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.keys() == other.keys()
            for name in mine:
                if not name.startswith("perf/") and name != "train/computed_tokens":
                    assert mine[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name


@pytest.mark.case("C59")
def test_tied_weights_stay_one_and_travel_once(together: dict[str, Any]) -> None:
    publish = together["publish"]
    assert together["tied"]
    assert "lm_head.weight" not in publish["target"]
    assert publish["buckets"] > 1
    assert publish["sent"] == publish["received"] == publish["checksums"]
    assert len(publish["sent"]) == len(publish["target"])
    close(publish["target"], {name.removeprefix("hf."): tensor for name, tensor in together["weights"].items()}, 1e-12)


def test_no_rank_ever_holds_the_whole_model(together: dict[str, Any]) -> None:
    publish = together["publish"]
    assert 0 < publish["peak"] <= 2 * publish["largest"]
    assert publish["peak"] < sum(tensor.nbytes for tensor in publish["target"].values()) / 2


def test_two_ranks_read_what_one_wrote(together: dict[str, Any], alone: dict[str, Any]) -> None:
    close(together["weights_resumed"], alone["weights_next"])


def test_one_rank_reads_what_two_wrote(together: dict[str, Any], tiny: str, store: Store, folder: Path) -> None:
    trainer = one_rank(tiny, store, load=str(folder / "from_two"))
    close(dict(trainer.model.named_parameters()), together["weights"], 1e-12)
    assert trainer.step == 4
    train(trainer, store, range(2, 3))
    close(dict(trainer.model.named_parameters()), together["weights_next"])


def test_export_from_shards_loads(together: dict[str, Any], folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "hf")
    close({f"hf.{name}": p for name, p in model.named_parameters()}, together["weights_next"], 1e-12)


def test_fewer_samples_than_ranks_and_nothing_to_learn(together: dict[str, Any]) -> None:
    assert together["few-7"][0]["train/num_tokens"] > 0
    (lonely,) = together["few-8"]  # a group of one has no advantage
    assert lonely["train/grad_norm"] == 0.0
    assert lonely["train/num_tokens"] > 0


def test_critic_and_actor_of_two_ranks_equal_those_of_one(together: dict[str, Any], tiny: str, store: Store) -> None:
    args = settings(tiny, **(PPO | {"num_trainers": 1}))
    critic, actor = make_trainer(args, store, "critic"), make_trainer(args, store)
    share = store.put(make_shares(0)[0])
    first = critic.train(0, share)
    actor.train(0, share, first.values)
    close(dict(critic.model.named_parameters()), together["critic_weights"])
    close(dict(actor.model.named_parameters()), together["actor_weights"])
    assert first.metrics_per_step[0]["train/value_loss"] == pytest.approx(together["critic"][0]["train/value_loss"], rel=1e-4)


def test_adapters_of_two_ranks_equal_those_of_one(together: dict[str, Any], alone: dict[str, Any]) -> None:
    close(alone["lora"]["weights"], together["lora"]["weights"])
    assert any(tensor.abs().max() > 1e-3 for name, tensor in together["lora"]["weights"].items() if name.endswith("lora_B"))
    for mine, other in zip(alone["lora"]["metrics"], together["lora"]["metrics"], strict=True):
        assert [m["train/loss"] for m in mine] == pytest.approx([m["train/loss"] for m in other], abs=1e-6)


@pytest.mark.parametrize("kind", ["lora", "lora_bf16"])
def test_base_and_adapter_are_merged_shard_by_shard_and_arrive(together: dict[str, Any], kind: str) -> None:
    """Nowhere more than two whole tensors at once: two_ranks.py asserts it on every rank."""
    weights, found = together[kind]["weights"], together[kind]["publish"]
    assert found["sent"] == found["received"] == found["checksums"]
    merged = 0
    for name, tensor in found["target"].items():
        expected = weights[f"hf.{name}"].double()
        layer = f"hf.{name.removesuffix('.weight')}"
        if f"{layer}.lora_A" in weights:
            expected = expected + 2.0 * weights[f"{layer}.lora_B"].double() @ weights[f"{layer}.lora_A"].double()
            merged += 1
        rounding = torch.finfo(tensor.dtype).eps * expected.abs() + 1e-6
        assert ((tensor.double() - expected).abs() <= rounding).all(), name
    assert merged == 7 * 4


def test_the_base_is_held_in_the_compute_type_and_adapters_in_float32(together: dict[str, Any], alone: dict[str, Any]) -> None:
    weights = together["lora_bf16"]["weights"]
    assert {tensor.dtype for name, tensor in weights.items() if "lora" not in name} == {torch.bfloat16}
    assert {tensor.dtype for name, tensor in weights.items() if "lora" in name} == {torch.float32}
    first, other = together["lora_bf16"]["metrics"][0][0], alone["lora"]["metrics"][0][0]
    assert first["train/grad_norm"] == pytest.approx(other["train/grad_norm"], rel=0.05)


def test_two_ranks_go_on_with_adapters_that_one_wrote(together: dict[str, Any], tiny: str, store: Store) -> None:
    whole = one_rank(tiny, store, **LORA | {"num_trainers": 1})
    train(whole, store, range(1))
    train(whole, store, range(1))
    close(dict(whole.model.named_parameters()), together["lora_resumed"]["weights"])


def test_export_of_sharded_adapters_is_merged(together: dict[str, Any], folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "lora_hf")
    target = together["lora"]["publish"]["target"]
    assert all(torch.equal(parameter, target[name]) for name, parameter in model.named_parameters())
    assert (folder / "lora_hf" / "adapter" / "adapter_model.safetensors").exists()
