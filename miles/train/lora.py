"""Low-rank adapters: a chosen linear layer W x becomes W x + (alpha / r) B A x with W frozen (Hu et al. 2021, arXiv:2106.09685).

Not the library peft: it renames the layers that it wraps, merges whole matrices into the base in place, and switches adapters off by
switching gradients of (sharded) parameters off. Here names stay those of Hugging Face, and the base is never written.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from miles.config.lora_rules import unlike
from miles.config.train import TrainSection
from miles.train.model import decoder_layers
from miles.train.sharding import full, local, sharded_like
from miles.weights.checksum import checksum

logger = logging.getLogger(__name__)

PARTS = ("lora_A", "lora_B")


class LoraLinear(nn.Linear):
    """Takes the place of `base`, whose weight and bias it shares.

    lora_A: float32 [r, inputs], uniform within 1 / sqrt(inputs). lora_B: float32 [outputs, r], zeros, so that it starts as the base.
    Dropout, of what goes into A, happens only where gradients are recorded.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float, dropout: float, generator: torch.Generator) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        limit = base.in_features**-0.5
        self.lora_A = nn.Parameter(torch.empty(rank, base.in_features).uniform_(-limit, limit, generator=generator))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale, self.dropout = alpha / rank, dropout
        self.on = True

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        if not self.on:
            return output
        seen = F.dropout(input, self.dropout) if self.dropout and torch.is_grad_enabled() else input
        return output + F.linear(F.linear(seen, self.lora_A), self.lora_B) * self.scale


@dataclass(frozen=True, slots=True)
class Adapters:
    """What adapters are and what they are trained on: saved with them, as they are worth nothing on another base."""

    rank: int
    alpha: float
    layers: list[str]  # the linear layers that have one, by their Hugging Face names
    base: str
    base_dtype: str
    base_checksum: str

    def check(self, saved: Mapping[str, Any], directory: Path) -> None:
        """Raises ValueError where those that are saved in `directory` do not fit, beyond what settings tell (config/lora_rules.py)."""
        if odd := sorted(set(saved["layers"]) ^ set(self.layers)):
            whose = "only in the checkpoint" if odd[0] in saved["layers"] else "not in the checkpoint"
            raise ValueError(f"--lora-targets: {len(odd)} adapters do not match those in {directory}: {odd[0]} is {whose}")
        if saved["base_dtype"] != self.base_dtype:
            raise ValueError(f"--dtype {self.base_dtype}: the adapters in {directory} are trained on a base in {saved['base_dtype']}")
        if saved["base_checksum"] != self.base_checksum:
            raise ValueError(
                f"--hf-checkpoint: {self.base} (checksum {self.base_checksum}) is not the base that the adapters in {directory} are"
                f" trained on: {saved['base']} (checksum {saved['base_checksum']})"
            )


def check_saved(saved: Mapping[str, Any] | None, own: Adapters | None, directory: Path) -> None:
    """Raises ValueError where what is in `directory` cannot go on: other adapters, another base, all weights of a model."""
    if text := unlike(saved, own.rank if own else 0, own.alpha if own else 0.0):
        raise ValueError(f"--load {directory}: {text}")
    if saved is not None and own is not None:
        own.check(saved, directory)


def is_adapter(name: str) -> bool:
    """Whether a parameter of that name belongs to an adapter."""
    return name.rpartition(".")[2] in PARTS


def add_adapters(hf: PreTrainedModel, args: TrainSection, seed: int, source: str) -> Adapters:
    """Freeze `hf`, which came from `source`, and give its chosen layers adapters, in place. Every rank makes the same ones.

    Raises:
        ValueError: a name in --lora-targets is that of no linear layer in the blocks.
    """
    hf.requires_grad_(False)
    every = _linear_layers(hf)
    if not every:
        raise ValueError(f"--lora-rank: {source} has no linear layers in its blocks")
    chosen = [name for name in every if not args.lora_targets or any(_is_called(name, target) for target in args.lora_targets)]
    for target in args.lora_targets:
        if not any(_is_called(name, target) for name in every):
            raise ValueError(_unknown(target, every, source))
    made = Adapters(args.lora_rank, args.lora_alpha, chosen, source, str(hf.dtype).removeprefix("torch."), _checksum_all(hf))
    generator = torch.Generator().manual_seed(seed)
    for name in chosen:
        hf.set_submodule(name, LoraLinear(every[name], args.lora_rank, args.lora_alpha, args.lora_dropout, generator))
    logger.info(
        "adapters of rank %d on %d layers (%s): %d parameters are trained, %d stay as they are",
        args.lora_rank,
        len(chosen),
        ", ".join(short_names(chosen)),
        sum(parameter.numel() for parameter in hf.parameters() if parameter.requires_grad),
        sum(parameter.numel() for parameter in hf.parameters() if not parameter.requires_grad),
    )
    if others := _matrices_elsewhere(hf, every):
        logger.warning("weights of the blocks that are in no linear layer get no adapter: %s", ", ".join(others))
    return made


def _linear_layers(hf: PreTrainedModel) -> dict[str, nn.Linear]:
    layers = decoder_layers(hf)
    prefix = next(name for name, module in hf.named_modules() if module is layers)
    return {f"{prefix}.{name}": module for name, module in layers.named_modules() if isinstance(module, nn.Linear)}


def _matrices_elsewhere(hf: PreTrainedModel, linear: dict[str, nn.Linear]) -> list[str]:
    """Short names of what no adapter can be put on, such as experts that lie in one tensor."""
    known = {id(layer.weight) for layer in linear.values()}
    named = decoder_layers(hf).named_parameters()
    return short_names([name for name, p in named if p.ndim > 1 and id(p) not in known and not is_adapter(name)])


def _is_called(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def short_names(names: list[str]) -> list[str]:
    """The last parts of these names, each once, in order."""
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))


def _unknown(target: str, layers: dict[str, nn.Linear], source: str) -> str:
    short = short_names(list(layers))
    near = difflib.get_close_matches(target.rpartition(".")[2], short, n=2, cutoff=0.5)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    return f"--lora-targets {target}: no linear layer in the blocks of {source} is called so; {meant}there are {', '.join(short)}"


def _checksum_all(hf: PreTrainedModel) -> str:
    """16 hexadecimal digits over all weights, their names and types."""
    lines = (f"{name} {p.dtype} {tuple(p.shape)} {checksum(p, 'xxh3_64')}" for name, p in hf.named_parameters())
    return xxhash.xxh3_64_hexdigest("\n".join(lines).encode())


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes with its base alone."""
    layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
    for layer in layers:
        layer.on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.on = True


def merged(base: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float) -> Tensor:
    """A new tensor W + scale B A, in the adapters' type; each rank computes its own rows. All ranks call it, as A is gathered."""
    rows = torch.addmm(local(base).to(lora_b.dtype), local(lora_b), full(lora_a), alpha=scale)
    return sharded_like(base, rows)
