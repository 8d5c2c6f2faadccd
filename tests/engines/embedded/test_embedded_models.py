"""Many architectures through the slots, and those that must be refused."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from miles.config.run_config import RunConfig
from miles.engines.embedded import fitting, llama
from miles.engines.embedded.engine import EmbeddedEngine
from miles.engines.embedded.llama import LlamaForward
from miles.engines.embedded.model import TransformersForward, load_model
from miles.train.model import load_causal_lm
from miles.types import Completion, GenerateRequest, SamplingParams

Start = Callable[..., EmbeddedEngine]
COMMON = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": 0,
}
MODELS: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {}),
    "llama with biases and scaled positions": (
        "llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0},
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8}),
    "gpt2": ("gpt2", {}),
    "gpt_neox": ("gpt_neox", {}),
    "phi3": ("phi3", {}),
    "gemma": ("gemma", {"head_dim": 8}),
    "olmo2": ("olmo2", {}),
}


def save(kind: str, extra: dict, folder: Path) -> PreTrainedModel:
    torch.manual_seed(0)
    config: PreTrainedConfig = CONFIG_MAPPING[kind](**(COMMON | extra))
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    return model


def ask(request_id: str, prompt: list[int], seed: int) -> GenerateRequest:
    return GenerateRequest(request_id, prompt, SamplingParams(12, seed=seed, ignore_eos=True))


@torch.no_grad()
def gap(model: PreTrainedModel, prompt: list[int], answer: Completion) -> np.ndarray:
    logits = model(torch.tensor([prompt + answer.token_ids])).logits[0].float().log_softmax(-1)
    fresh = logits[len(prompt) - 1 : -1].gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0].numpy()
    return np.abs(fresh - np.array(answer.logprobs))


@pytest.mark.parametrize("name", MODELS)
async def test_logprobs_equal_a_fresh_forward_pass(start: Start, tmp_path: Path, name: str) -> None:
    kind, extra = MODELS[name]
    model = save(kind, extra, tmp_path)
    engine = await start(hf_checkpoint=str(tmp_path), engine_max_context=64, engine_prefill_tokens=16)
    assert isinstance(engine._core.ready.forward, LlamaForward if kind in ("llama", "qwen2", "qwen3") else TransformersForward)
    prompts = [[(3 * i + 5 * j) % 120 + 2 for j in range(4 * i + 1)] for i in range(8)]
    answers = await asyncio.gather(*(engine.generate(ask(f"r{i}", prompt, i)) for i, prompt in enumerate(prompts)))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert gap(model, prompt, answer).max() < 1e-4
        assert gap(model, prompt, answer).mean() < 1e-5


async def test_both_passes_of_one_model_agree(start: Start, checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [ask(f"r{i}", list(range(2, 9 + 5 * i)), i) for i in range(6)]
    fast = await start()
    monkeypatch.setattr(llama, "KNOWN", ())
    general = await start("general")
    assert isinstance(general._core.ready.forward, TransformersForward)
    for left, right in zip(*[await asyncio.gather(*map(engine.generate, requests)) for engine in (fast, general)], strict=True):
        assert left.token_ids == right.token_ids
        np.testing.assert_allclose(left.logprobs, right.logprobs, atol=1e-5)


async def test_a_fast_pass_that_is_wrong_is_not_used(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "_rotated", lambda x, cos, sin: x)
    engine = await start()
    assert isinstance(engine._core.ready.forward, TransformersForward)


@pytest.mark.parametrize(
    ("kind", "extra", "message"),
    [
        ("gemma2", {"head_dim": 8}, "full attention only"),
        ("gemma2", {"head_dim": 8, "layer_types": ["full_attention"] * 2, "attn_logit_softcapping": 2.0}, "softcap"),
        ("mistral", {"sliding_window": 4}, "sliding_window"),
        ("mamba", {"state_size": 4}, "full attention only"),
        ("bloom", {"n_head": 4, "hidden_size": 32, "n_layer": 2}, "equal attention layers|architecture|attention"),
    ],
)
async def test_other_attention_is_refused(start: Start, tmp_path: Path, kind: str, extra: dict, message: str) -> None:
    save(kind, extra, tmp_path)
    with pytest.raises(ValueError, match=message):
        await start(hf_checkpoint=str(tmp_path), engine_max_context=64)


async def test_a_pass_that_cannot_be_right_is_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "_gap", lambda *_: float("inf"))
    with pytest.raises(ValueError, match="cannot serve this architecture"):
        await start()


async def test_bfloat16(start: Start, tmp_path: Path) -> None:
    model = save("qwen3", {"head_dim": 16}, tmp_path).to(torch.bfloat16)
    engine = await start(hf_checkpoint=str(tmp_path), dtype="bfloat16", engine_max_context=64)
    assert isinstance(engine._core.ready.forward, LlamaForward)
    answer = await engine.generate(ask("r", [5, 6, 7], 0))
    assert gap(model, [5, 6, 7], answer).mean() < 0.05


def test_threads_may_load_at_once(checkpoint: str) -> None:
    """transformers alone fails here: one thread's meta device is every thread's."""
    start, loaded, failed = threading.Barrier(4), [], []

    def load(engine: bool) -> None:
        start.wait()
        try:
            loaded.append(load_model(checkpoint, "float32", torch.device("cpu")) if engine else load_causal_lm(checkpoint, RunConfig()))
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=load, args=(index % 2 == 0,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len({model.get_input_embeddings().weight.sum().item() for model in loaded}) == 1
