"""Families of models: packed computation equals samples alone, or the model is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from miles.config.model import ModelSection
from miles.train.micro_batches import PackingRule, pack
from miles.train.model import PolicyModel, load_causal_lm
from tests.train.rollouts import Store, make_data, make_shares, make_trainer, settings
from tests.train.test_micro_batches import TEMPERATURE, alone, packed

SMALL: dict[str, Any] = {"vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
INNER = {"intermediate_size": 64}
SPECIAL = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
WINDOW = 6


def config_of(family: str) -> PreTrainedConfig:
    common = SMALL | INNER | SPECIAL
    return {
        "llama": lambda: LlamaConfig(**common),
        "qwen2": lambda: Qwen2Config(**common, tie_word_embeddings=True),
        "qwen2-window": lambda: Qwen2Config(**common, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
        "mistral": lambda: MistralConfig(**common, sliding_window=WINDOW),
        "gemma3": lambda: Gemma3TextConfig(
            **common, head_dim=8, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
        ),
        "granite": lambda: GraniteConfig(**common, logits_scaling=4.0, embedding_multiplier=3.0),
        "olmo2": lambda: Olmo2Config(**common),
        "qwen3-moe": lambda: Qwen3MoeConfig(
            **common, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1
        ),
        "gpt2": lambda: GPT2Config(vocab_size=512, n_embd=32, n_layer=2, n_head=4, attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5),
        "gemma2": lambda: Gemma2Config(**common, head_dim=8),
        "phi": lambda: PhiConfig(**(common | {"num_key_value_heads": 4})),
        "qwen3-next": lambda: Qwen3NextConfig(**common, head_dim=8, num_experts=4, moe_intermediate_size=16),
    }[family]()


def saved(family: str, folder: Path) -> str:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen2-window", "mistral", "gemma3", "granite", "olmo2", "qwen3-moe", "gpt2"])
def test_packing_is_exact(family: str, tmp_path: Path) -> None:
    policy = PolicyModel(load_causal_lm(saved(family, tmp_path), ModelSection()), TEMPERATURE)
    data = make_data(2, groups=2, siblings=3, longest=16)
    for share in (True, False):
        rule = PackingRule(400, share, dense_mask=True, hidden_size=32)
        batches = pack(data.token_ids, data.offsets, data.loss_mask, range(data.num_samples), rule)
        mask = torch.tensor(data.loss_mask, dtype=torch.bool)
        with torch.no_grad():
            want, got = alone(policy, data), packed(policy, batches, len(mask))
        assert (want[0] - got[0])[mask].abs().max() < 1e-4
        assert (want[1] - got[1])[mask].abs().max() < 1e-4


@pytest.mark.parametrize(("family", "reason"), [("gemma2", "soft cap"), ("phi", "plain linear output"), ("qwen3-next", "linear_attention")])
def test_what_cannot_be_exact_is_refused(family: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        load_causal_lm(saved(family, tmp_path), ModelSection(), "--ref-checkpoint")
    assert str(caught.value).startswith("--ref-checkpoint: ")


def test_a_missing_model_names_the_flag(tmp_path: Path, store: Store) -> None:
    trainer = None
    with pytest.raises(ValueError, match=r"--hf-checkpoint: .*nowhere"):
        trainer = make_trainer(settings(str(tmp_path / "nowhere")), store)
    assert trainer is None


def test_gradient_checkpointing_changes_nothing(tiny: str, store: Store) -> None:
    share = store.put(make_shares(0)[0])
    plain, saving = (make_trainer(settings(tiny, gradient_checkpointing=on), store) for on in (False, True))
    a, b = (trainer.train(0, share).metrics_per_step[0] for trainer in (plain, saving))
    assert a["train/grad_norm"] == pytest.approx(b["train/grad_norm"], rel=1e-5)
    for left, right in zip(plain.model.parameters(), saving.model.parameters(), strict=True):
        assert torch.allclose(left, right, atol=1e-6)


def test_bfloat16_on_one_rank_keeps_float32_master_weights(tiny: str, store: Store) -> None:
    reference = make_trainer(settings(tiny), store)
    args = settings(tiny, dtype="bfloat16", advantage_estimator="ppo", use_tis=True)
    critic, actor = make_trainer(args, store, "critic"), make_trainer(args, store)
    share = store.put(make_shares(0)[0])
    first = critic.train(0, share)
    (metrics,) = actor.train(0, share, first.values).metrics_per_step
    (wanted,) = reference.train(0, share).metrics_per_step
    assert metrics["train/entropy"] == pytest.approx(wanted["train/entropy"], abs=0.02)
    assert {parameter.dtype for parameter in actor.model.parameters()} == {torch.float32}
    assert {spec.dtype for bucket in actor.plan_publish(1).buckets for spec in bucket} == {"bfloat16"}
    actor.abort_publish()
    critic.dispose()
    actor.dispose()
