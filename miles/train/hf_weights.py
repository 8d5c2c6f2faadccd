"""A trained model's weights as Hugging Face and the engines know them."""

from __future__ import annotations

import torch
from torch import Tensor

from miles.train.lora import LoraLinear, is_adapter, merged
from miles.train.model import TrainedModel


class HFWeights:
    """By Hugging Face name, a tied one once, in a fixed order. Heads that Hugging Face does not know are left out.

    Where a layer has an adapter, its weight is base plus adapter, made anew whenever it is asked for: the base stays as it is to the bit.
    """

    def __init__(self, model: TrainedModel) -> None:
        self._parameters: dict[str, Tensor] = dict(model.hf.named_parameters())
        self._scales = {f"{name}.weight": module.scale for name, module in model.hf.named_modules() if isinstance(module, LoraLinear)}
        self.shapes = {name: tuple(parameter.shape) for name, parameter in self._parameters.items() if not is_adapter(name)}

    def shard(self, name: str, dtype: torch.dtype, kept: dict[str, Tensor] | None = None) -> Tensor:
        """This rank's part of one weight in `dtype`. All ranks call it in the same order.

        Args:
            kept: parameters by name that count instead of the model's current ones.
        """
        parameters = self._parameters if kept is None else self._parameters | kept
        layer, scale = name.removesuffix("weight"), self._scales.get(name)
        if scale is None:
            return parameters[name].detach().to(dtype)
        base, lora_a, lora_b = (parameters[part].detach() for part in (name, f"{layer}lora_A", f"{layer}lora_B"))
        return merged(base, lora_a, lora_b, scale).to(dtype)

    def adapters(self) -> dict[str, Tensor]:
        """This rank's parts of all adapters."""
        return {name: parameter.detach() for name, parameter in self._parameters.items() if is_adapter(name)}
