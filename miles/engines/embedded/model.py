"""Loads the model, and runs one packed forward pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from miles.engines.embedded import attention
from miles.engines.embedded.attention import Batch, attending
from miles.engines.embedded.cache import CacheShape
from miles.weights.loading import ONE_MODEL

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def pick_device(device: str) -> torch.device:
    """auto, cpu or cuda -> a device that is there.

    Raises:
        ValueError: cuda is asked for and there is none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here")
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def load_model(checkpoint: str, dtype: str, device: torch.device, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Load a causal LM for inference, its attention routed to the slots.

    Raises:
        ValueError: the checkpoint is missing, or is not a full-attention model.
    """
    if not checkpoint:
        raise ValueError("--hf-checkpoint: no model is given")
    path = Path(checkpoint).expanduser()
    if path.is_dir() and not (path / "config.json").exists():
        raise ValueError(f"--hf-checkpoint {checkpoint}: the directory has no config.json")
    try:
        with ONE_MODEL:
            config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
            _check_full_attention(checkpoint, config)
            model = AutoModelForCausalLM.from_pretrained(
                checkpoint,
                config=config,
                dtype=DTYPES[dtype],
                attn_implementation=attention.NAME,
                trust_remote_code=trust_remote_code,
            )
    except OSError as error:
        raise ValueError(f"--hf-checkpoint {checkpoint}: {error}") from error
    move(model, device)
    return model.eval().requires_grad_(False)


def move(model: PreTrainedModel, device: torch.device) -> None:
    """Move the weights; parameters stay the same objects."""
    torch.nn.Module.to(model, device)


def vocabulary_of(model: PreTrainedModel) -> int:
    """Token ids that the model can read."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight.shape[0]


def _check_full_attention(checkpoint: str, hf: PreTrainedConfig) -> None:
    kinds = set(getattr(hf, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(f"--hf-checkpoint {checkpoint}: the embedded engine knows full attention only, this model has {sorted(kinds)}")


class Forward(Protocol):
    """One packed pass through a model."""

    def __call__(self, token_ids: torch.Tensor, batch: Batch, keep: torch.Tensor) -> torch.Tensor:
        """token_ids [tokens]; keep [rows]: places whose logits are wanted. Returns logits [rows, vocabulary]."""
        ...

    def rebind(self) -> None:
        """Called when the model's parameters have moved to another device."""
        ...


class TransformersForward:
    """The pass as transformers makes it: for any model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __call__(self, token_ids: torch.Tensor, batch: Batch, keep: torch.Tensor) -> torch.Tensor:
        with attending(batch):
            output = self._model(input_ids=token_ids[None], position_ids=batch.positions[None], use_cache=False, logits_to_keep=keep)
        return output.logits[0]

    def rebind(self) -> None:
        pass  # asks the model anew at each pass


@dataclass(slots=True)
class _Probe:
    """Stands in for a batch and notes what each layer would cache."""

    shapes: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
        self.shapes[layer] = (key.shape[1], key.shape[2], value.shape[2])
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])


@torch.inference_mode()
def probe_cache(model: PreTrainedModel) -> CacheShape:
    """Find what a token keeps in the cache by running one through the model.

    Raises:
        ValueError: layers differ, or do not use the attention that they were given.
    """
    probe = _Probe()
    with attending(probe):
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)
    kinds = set(probe.shapes.values())
    if len(kinds) != 1 or sorted(probe.shapes) != list(range(len(probe.shapes))):
        raise ValueError(f"{type(model).__name__}: the embedded engine needs equal attention layers that take a custom attention function")
    heads, key_dim, value_dim = kinds.pop()
    return CacheShape(len(probe.shapes), heads, key_dim, value_dim, model.dtype, model.device)
