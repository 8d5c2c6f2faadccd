"""From a checkpoint to a model of this rank: loaded, with adapters if there are to be some, sharded, on its device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from miles.config.run_config import RunConfig
from miles.train import lora
from miles.train.mesh import Ranks
from miles.train.model import PolicyModel, TrainedModel, ValueModel, load_causal_lm
from miles.train.random_model import resolve_checkpoint
from miles.train.sharding import shard
from miles.types import Role

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a role trains."""

    model: TrainedModel
    source: str  # directory or hub name that it came from
    adapters: lora.Adapters | None  # where they alone are trained


def load_trained(args: RunConfig, role: Role, ranks: Ranks) -> Loaded:
    """The model of a role: float32 masters of all weights, or adapters on a base in --dtype."""
    own = args.critic_checkpoint if role == "critic" else None
    source = resolve_checkpoint(own or args.hf_checkpoint, args.seed)
    dtype = DTYPES[args.dtype] if args.lora_rank else torch.float32
    hf = load_causal_lm(source, args, "--critic-checkpoint" if own else "--hf-checkpoint", dtype)
    adapters = lora.add_adapters(hf, args, args.seed, source) if args.lora_rank else None
    return Loaded(_on_device(hf, args, role, ranks), source, adapters)


def load_asked(args: RunConfig, source: str, setting: str, ranks: Ranks) -> TrainedModel:
    """A model of the actor's kind that is asked and never trained. `setting`: the flag that names it."""
    return _on_device(load_causal_lm(source, args, setting), args, "actor", ranks)


def _on_device(hf: PreTrainedModel, args: RunConfig, role: Role, ranks: Ranks) -> TrainedModel:
    model = PolicyModel(hf, args.temperature) if role == "actor" else ValueModel(hf, args.seed)
    if ranks.mesh is not None:
        shard(model, ranks.mesh, DTYPES[args.dtype])
    return model.to(ranks.device)
