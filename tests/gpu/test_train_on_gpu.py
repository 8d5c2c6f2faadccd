"""The trainer on a GPU. Run by hand: pytest -m gpu -s tests/gpu/test_train_on_gpu.py"""

import asyncio
import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from miles.data.rollout_data import pack, split
from miles.train.random_model import ensure_model
from miles.train.sharding import full
from miles.train.trainer import Trainer
from tests.train.rollouts import Store, make_groups, make_shares, settings

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(ensure_model("random:tiny", 0, tmp_path_factory.mktemp("models")))


def make(model: str, store: Store, port: int = 29611, **changes: Any) -> Trainer:
    trainer = Trainer(settings(model, **({"device": "cuda"} | changes)), "actor", 0, 1, store)
    trainer.init("127.0.0.1", port)
    return trainer


def run(trainer: Trainer, seeds: range) -> list[dict[str, float]]:
    return [m for s in seeds for m in trainer.train(s, trainer.store.put(make_shares(s)[0])).metrics_per_step]


def test_float32_is_that_of_the_cpu(tiny: str) -> None:
    results = [run(make(tiny, Store(), device=device), range(3)) for device in ("cpu", "cuda")]
    for cpu, gpu in zip(*results, strict=True):
        assert gpu["train/loss"] == pytest.approx(cpu["train/loss"], abs=1e-5)
        assert gpu["train/grad_norm"] == pytest.approx(cpu["train/grad_norm"], rel=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_save_offload_publish_export(tiny: str, tmp_path: Path, dtype: str) -> None:
    store = Store()
    trainer = make(tiny, store, dtype=dtype, weight_transport="shared_memory")
    reference = run(make(tiny, Store(), device="cpu"), range(2))
    ours = run(trainer, range(2))
    for a, b in zip(ours, reference, strict=True):
        assert a["train/entropy"] == pytest.approx(b["train/entropy"], abs=0.05)
    trainer.save(1, str(tmp_path / "rollout_000001"), force_sync=False)
    held = torch.cuda.memory_allocated()
    trainer.offload()
    trainer.offload()
    assert torch.cuda.memory_allocated() < held
    trainer.onload()
    asyncio.run(trainer.wait_for_save())
    (tmp_path / "rollout_000001" / "COMPLETE").write_text('{"files": {}}')
    resumed = make(tiny, store, dtype=dtype, load=str(tmp_path))
    again, on = run(resumed, range(2, 3)), run(trainer, range(2, 3))
    assert again[0]["train/loss"] == pytest.approx(on[0]["train/loss"], abs=1e-6)
    plan = trainer.plan_publish(1)
    for index in range(len(plan.buckets)):
        trainer.send_bucket(index)
    assert trainer.end_publish() == trainer.weights_checksum()
    trainer.export_hf(str(tmp_path / "hf"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert str(model.dtype).removeprefix("torch.") == dtype


def test_speed_of_a_real_shape(tmp_path: Path) -> None:
    model = str(ensure_model("random:qwen3-0.6b", 0, tmp_path))
    data = pack(make_groups(0, groups=16, siblings=8, longest=400, prompt=(100, 101)))
    for share in (True, False):
        store = Store()
        torch.cuda.reset_peak_memory_stats()
        changes = {"rollout_batch_size": 16, "n_samples_per_prompt": 8, "max_tokens_per_micro_batch": 8192, "share_prompts": share}
        trainer = make(model, store, dtype="bfloat16", lr=1e-6, **changes)
        for _ in range(3):
            ref = store.put(split(data, 1, data.num_samples, 0, 1)[0])
            torch.cuda.synchronize()
            started = time.perf_counter()
            (metrics,) = trainer.train(0, ref).metrics_per_step
            torch.cuda.synchronize()
            seconds = time.perf_counter() - started
        print(
            f"share {share}: {seconds:.2f} s a step, {len(data.token_ids)} tokens, {metrics['train/computed_tokens']:.0f} computed,"
            f" padding {metrics['perf/train_padding_share']:.2f}, peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
        )
        assert metrics["train/grad_norm"] > 0
        del trainer


def test_adapters_need_the_memory_of_the_base_alone(tmp_path: Path) -> None:
    """One step of a bfloat16 model of a real shape, whole and with adapters: memory, base, publish."""
    model = str(ensure_model("random:qwen3-0.6b", 0, tmp_path))
    held = {}
    for rank in (0, 16):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        adapters = {"lora_rank": rank, "lora_alpha": 32.0, "kl_loss_coef": 0.1 if rank else 0.0}
        trainer = make(model, Store(), dtype="bfloat16", weight_transport="shared_memory", **adapters)
        run(trainer, range(1))
        trainer.offload()
        trainer.onload()
        run(trainer, range(1, 2))
        held[rank], peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
        seconds = []
        for version in range(3):
            torch.cuda.synchronize()
            started = time.perf_counter()
            sums = trainer.weights_checksum()
            seconds.append(time.perf_counter() - started)
            plan = trainer.plan_publish(version)
            for index in range(len(plan.buckets)):
                trainer.send_bucket(index)
            assert trainer.end_publish() == sums
        print(f"rank {rank}: {held[rank] / 2**30:.2f} GiB held, {peak / 2**30:.2f} at most; all weights as sent: {min(seconds):.3f} s")
        if rank:
            base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
            for name, parameter in base.named_parameters():
                own = trainer.model.hf.get_parameter(name)
                assert own.dtype == torch.bfloat16
                assert torch.equal(full(own.detach()).cpu(), parameter), name
            assert trainer.frozen.loaded == {}
        trainer.dispose()
        del trainer
    assert held[16] < 0.2 * held[0]
