"""What a checkpoint says of a model, without its weights."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from miles.config.run_config import RunConfig
from miles.engines.embedded.model import DTYPES, vocabulary_of
from miles.engines.embedded.stopping import Stopping
from miles.engines.sglang.places import NamedShape
from miles.weights.loading import ONE_MODEL


@dataclass(frozen=True)
class Checkpoint:
    """Names, types and shapes of the tensors that a publish brings; vocabulary; ends of a response."""

    tensors: list[NamedShape]  # tied ones once
    vocabulary: int
    stopping: Stopping


def describe(args: RunConfig) -> Checkpoint:
    """
    Raises:
        ValueError: the checkpoint is missing, or its context is too short.
    """
    name = args.hf_checkpoint
    if not name:
        raise ValueError("--hf-checkpoint: no model is given")
    if Path(name).expanduser().is_dir() and not (Path(name).expanduser() / "config.json").exists():
        raise ValueError(f"--hf-checkpoint {name}: the directory has no config.json")
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=args.trust_remote_code)
    except OSError as error:
        raise ValueError(f"--hf-checkpoint {name}: {error}") from error
    longest = config.to_dict().get("max_position_embeddings")
    if longest is not None and args.engine_max_context > longest:
        raise ValueError(f"--engine-max-context {args.engine_max_context}: the model knows {longest} positions")
    with ONE_MODEL, torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[args.dtype], trust_remote_code=args.trust_remote_code)
    with contextlib.suppress(OSError):  # without one the model's own config says what ends a response
        model.generation_config = GenerationConfig.from_pretrained(name)
    shapes = [(key, str(value.dtype).removeprefix("torch."), tuple(value.shape)) for key, value in model.named_parameters()]
    return Checkpoint(shapes, vocabulary_of(model), Stopping.of(model, name, trust_remote_code=args.trust_remote_code))
