"""The trained modules: a Hugging Face backbone whose output layer looks only at states whose next token is trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from miles.config.model import ModelSection
from miles.train.micro_batches import MicroBatch
from miles.train.output_layer import token_logprobs
from miles.weights.loading import ONE_MODEL

transformers_logging.disable_progress_bar()


def load_causal_lm(path: str, args: ModelSection, setting: str = "--hf-checkpoint", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model at `path`, a directory or hub name, without dropout, on the CPU.

    Raises ValueError, naming the flag `setting`, for what cannot be loaded or not be trained exactly.
    """
    try:
        with ONE_MODEL:
            config = AutoConfig.from_pretrained(path, trust_remote_code=args.trust_remote_code)
            check_supported(config)
            for name, value in config.to_dict().items():
                if "dropout" in name and isinstance(value, float):
                    setattr(config, name, 0.0)
            model = AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                attn_implementation=args.attn_implementation,
                trust_remote_code=args.trust_remote_code,
            )
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"{setting}: {path} cannot be trained: {error}") from error
    output = model.get_output_embeddings()
    if not isinstance(output, nn.Linear) or output.bias is not None:
        raise ValueError(f"{setting}: {path} has no plain linear output layer, which the trainer needs")
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train(args.gradient_checkpointing)
    return model


def check_supported(config: PreTrainedConfig) -> None:
    """Raises ValueError for models whose log-probs the trainer would not compute exactly."""
    known = config.to_dict()
    if known.get("final_logit_softcapping"):
        raise ValueError("models with a soft cap on their logits are not supported")
    kinds = set(known.get("layer_types") or ["full_attention"])
    if odd := kinds - {"full_attention", "sliding_attention"}:
        raise ValueError(f"layers of kind {sorted(odd)} cannot be packed exactly and are not supported")


def logit_scale(config: PreTrainedConfig) -> float:
    """Some families multiply or divide their logits by a constant."""
    known = config.to_dict()
    scale, divisor = known.get("logit_scale"), known.get("logits_scaling")
    return (1.0 if scale is None else float(scale)) / (1.0 if divisor is None else float(divisor))


def hidden_size(hf: PreTrainedModel) -> int:
    embeddings = hf.get_input_embeddings()
    assert isinstance(embeddings, nn.Embedding)
    return embeddings.embedding_dim


def decoder_layers(hf: PreTrainedModel) -> nn.ModuleList:
    """The outermost list of modules in the backbone."""
    return next(module for module in hf.base_model.modules() if isinstance(module, nn.ModuleList))


class TrainedModel(nn.Module):
    """What both roles have in common: the backbone up to the chosen states. FSDP wraps this module as its root."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf
        self.window = sliding_window(hf.config)
        self.every_layer_slides = hf.config.to_dict().get("layer_types") is None
        self.float_mask = hf.config._attn_implementation == "eager"

    @property
    def backbone(self) -> nn.Module:
        return self.hf.base_model

    @property
    def layers(self) -> nn.ModuleList:
        return decoder_layers(self.hf)

    def hidden(self, batch: MicroBatch) -> Tensor:
        """[states, hidden size] the backbone's last hidden states where a next token is trained."""
        output = self.backbone(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=self._attention_mask(batch.mask, batch.position_ids),
            use_cache=False,
        )
        return output.last_hidden_state.flatten(0, 1).index_select(0, batch.states)

    def _attention_mask(self, mask: Tensor | None, position_ids: Tensor) -> Any:
        if mask is None:
            return None
        if self.window is None or self.window >= position_ids.shape[1]:
            return self._as_wanted(mask)
        near = (position_ids[:, :, None] - position_ids[:, None, :] < self.window)[:, None]
        if self.every_layer_slides:
            return self._as_wanted(mask & near)
        return {"full_attention": self._as_wanted(mask), "sliding_attention": self._as_wanted(mask & near)}

    def _as_wanted(self, mask: Tensor) -> Tensor:
        if not self.float_mask:
            return mask
        dtype = self.hf.dtype
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


class PolicyModel(TrainedModel):
    """The actor: log-probs of chosen tokens, and entropies of the states that they follow."""

    def __init__(self, hf: PreTrainedModel, temperature: float) -> None:
        super().__init__(hf)
        self.scale = logit_scale(hf.config) / temperature

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """float32 [edges] log-probs under softmax(logits / temperature), and float32 [states] entropies."""
        return token_logprobs(self.hidden(batch), self.hf.get_output_embeddings().weight, batch.state_of, batch.targets, self.scale)


class ValueModel(TrainedModel):
    """The critic: the value of a token is that of the state before it, read off the hidden state of the token before."""

    def __init__(self, hf: PreTrainedModel, seed: int) -> None:
        super().__init__(hf)
        size = hidden_size(hf)
        hf.set_output_embeddings(nn.Identity())
        hf.config.tie_word_embeddings = False
        self.value_head = nn.Linear(size, 1)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self.value_head.weight.normal_(0.0, 1.0 / (size + 1), generator=generator)
            self.value_head.bias.zero_()

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """float32 [edges] values of the states that the edges follow, and the same as float32 [states]."""
        values = self.value_head(self.hidden(batch))[:, 0].float()
        return values.index_select(0, batch.state_of), values


def sliding_window(config: PreTrainedConfig) -> int | None:
    """Width of the sliding window, for models that have layers with one."""
    known = config.to_dict()
    kinds = known.get("layer_types")
    return known.get("sliding_window") if kinds is None or "sliding_attention" in kinds else None
