"""Adapters in the format of the library peft: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn

from miles.train.hf_weights import HFWeights
from miles.train.lora import Adapters, short_names
from miles.train.sharding import full


def gathered_adapters(weights: HFWeights) -> dict[str, Tensor]:
    """Copies of all adapters by peft's names, float32 on the CPU. All ranks call it."""
    whole = ((name, full(shard).cpu().clone()) for name, shard in weights.adapters().items())
    return {f"base_model.model.{name}.weight": tensor for name, tensor in whole}


def write_adapter(directory: Path, tensors: dict[str, Tensor], adapters: Adapters, hf: nn.Module) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    base = Path(adapters.base)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base.absolute()) if base.is_dir() else adapters.base,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": 0.0,
        "target_modules": _targets(adapters, hf),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})


def _targets(adapters: Adapters, hf: nn.Module) -> list[str]:
    """Last parts of the layers' names, which servers expect, where these mean no other layer; whole names otherwise."""
    short = short_names(adapters.layers)
    meant = {name for name, module in hf.named_modules() if isinstance(module, nn.Linear) and name.rpartition(".")[2] in short}
    return short if meant == set(adapters.layers) else adapters.layers
