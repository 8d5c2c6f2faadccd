"""Turns a GGUF file of a Llama-shaped model into a Hugging Face checkpoint directory, without torch."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL_TOKEN = 3  # GGUF's token type of special tokens


class UnsupportedGGUF(ValueError):
    """The file is not of the one kind that is converted here."""


def convert(gguf_file: Path, directory: Path) -> None:
    """Write config, tokenizer and float32 weights of `gguf_file` to `directory`, which appears whole or not at all.

    Raises:
        UnsupportedGGUF: another architecture than llama, or a tokenizer other than SmolLM's byte-level BPE.
    """
    from gguf import GGUFReader

    reader = GGUFReader(str(gguf_file))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama" or fields.get("tokenizer.ggml.pre") != "smollm":
        kind = f"{fields.get('general.architecture')}/{fields.get('tokenizer.ggml.pre')}"
        raise UnsupportedGGUF(f"{gguf_file}: only llama models with SmolLM's tokenizer are converted, this is {kind}")
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        _write_tokenizer(fields, unfinished)
        _write_config(fields, unfinished)
        _write_weights(reader, fields, unfinished)
        unfinished.chmod(0o755)
        if directory.exists():
            shutil.rmtree(directory)
        os.replace(unfinished, directory)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _write_weights(reader: Any, fields: dict[str, Any], directory: Path) -> None:
    from gguf.quants import dequantize

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    state: dict[str, np.ndarray] = {}
    for tensor in reader.tensors:
        part, *rest = tensor.name.removesuffix(".weight").split(".")
        weight = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if part == "blk":
            number, kind = rest
            if kind in heads:
                weight = _interleaved_to_halves(weight, heads[kind])
            name = f"model.layers.{number}.{LAYER_NAMES[kind]}.weight"
        else:
            name = f"{OUTER_NAMES[part]}.weight"
        state[name] = np.ascontiguousarray(weight)
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)


def _interleaved_to_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """GGUF keeps the two parts of each rotary pair side by side, transformers keeps them half a head apart."""
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, half, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _write_config(fields: dict[str, Any], directory: Path) -> None:
    eos, bos, pad = (fields[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "bos", "padding"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": 1e-5,
        "rope_theta": fields["llama.rope.freq_base"],
        "initializer_range": 0.041666666666666664,
        "tie_word_embeddings": True,
        "vocab_size": fields["llama.vocab_size"],
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "dtype": "float32",
    }
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad})


def _write_tokenizer(fields: dict[str, Any], directory: Path) -> None:
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: place for place, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # every digit is a token of its own
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {
        name: tokens[fields[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding"))
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": fields["llama.context_length"], **named}
    _write_json(directory / "tokenizer_config.json", {**settings, "clean_up_tokenization_spaces": False})
    (directory / "chat_template.jinja").write_text(fields["tokenizer.chat_template"])


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
