"""The forward pass of Llama-shaped models, written out: the same numbers as transformers' in a third of its operations.

A decode step of a small model is mostly overhead. Here products that read the same input are one product: their weights become
views into one tensor, under the same parameters, so that in-place updates, checksums and names do not notice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM

from miles.engines.embedded.attention import Batch

KNOWN: tuple[type[PreTrainedModel], ...] = (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)


@dataclass(slots=True)
class Fused:
    """Several linear layers of one input as one."""

    weight: Tensor  # [outputs of all, inputs]
    bias: Tensor | None

    @classmethod
    def of(cls, *parts: nn.Linear) -> Fused:
        """Lay the parts' weights side by side; their parameters become views of the result."""
        biases = [part.bias for part in parts]
        return cls(_join(*(part.weight for part in parts)), None if biases[0] is None else _join(*biases))

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def _join(*parameters: Tensor) -> Tensor:
    joined = torch.cat([parameter.data for parameter in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = joined[start : start + len(parameter)]
        start += len(parameter)
    return joined


class LlamaForward:
    """Implements `Forward` for the models in KNOWN."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model  # whose parts torch cannot type
        self.rebind()

    @staticmethod
    def knows(model: PreTrainedModel) -> bool:
        return type(model) in KNOWN and model.config.hidden_act == "silu"

    def rebind(self) -> None:
        self._layers = [_Layer(layer, index) for index, layer in enumerate(self._model.model.layers)]

    def __call__(self, token_ids: Tensor, batch: Batch, keep: Tensor) -> Tensor:
        body = self._model.model
        x = body.embed_tokens(token_ids)  # [tokens, hidden]
        cos, sin = body.rotary_emb(x[None], batch.positions[None])
        half = cos.shape[-1] // 2  # both halves are equal
        cos, sin = cos[0, :, None, :half], sin[0, :, None, :half]  # [tokens, 1, dim / 2]
        for layer in self._layers:
            x = layer(x, cos, sin, batch)
        return self._model.lm_head(_normalised(x.index_select(0, keep), body.norm.weight, body.norm.variance_epsilon))


class _Layer:
    def __init__(self, layer: Any, index: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.index = index
        self.dim = attention.head_dim
        self.scale = attention.scaling
        self.num_heads = attention.q_proj.out_features // self.dim
        self.num_kv_heads = attention.k_proj.out_features // self.dim
        self.qkv = Fused.of(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = attention.o_proj
        self.gate_up = Fused.of(mlp.gate_proj, mlp.up_proj)
        self.down = mlp.down_proj
        self.norm_in, self.norm_mlp = layer.input_layernorm, layer.post_attention_layernorm
        self.norm_q: Any = getattr(attention, "q_norm", None)
        self.norm_k: Any = getattr(attention, "k_norm", None)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, batch: Batch) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]"""
        tokens = len(x)
        normed = _normalised(x, self.norm_in.weight, self.norm_in.variance_epsilon)
        q, k, v = self.qkv(normed).view(tokens, -1, self.dim).split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        if self.norm_q is not None:
            q = _normalised(q, self.norm_q.weight, self.norm_q.variance_epsilon)
            k = _normalised(k, self.norm_k.weight, self.norm_k.variance_epsilon)
        mixed = batch.attend(self.index, _rotated(q, cos, sin), _rotated(k, cos, sin), v, self.scale)
        x = x + self.out(mixed.reshape(tokens, -1))
        normed = _normalised(x, self.norm_mlp.weight, self.norm_mlp.variance_epsilon)
        gate, up = self.gate_up(normed).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def _normalised(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMS norm as transformers computes it: in float32, rounded to x's type before the weight is applied."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, epsilon)
    return weight * F.rms_norm(x.float(), weight.shape, eps=epsilon).to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021), halves as transformers pairs them. x [tokens, heads, dim]"""
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
