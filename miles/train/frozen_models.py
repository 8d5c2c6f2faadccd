"""Models that the trainer asks and never trains: the reference of the KL, and the teacher."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from miles.config.run_config import RunConfig
from miles.data.tokenizer import load_tokenizer
from miles.train import offload
from miles.train.lora import adapters_off
from miles.train.model import PolicyModel, TrainedModel
from miles.train.random_model import resolve_checkpoint

Part = Literal["reference", "teacher"]


class FrozenModels:
    """Each is loaded when it is first asked for."""

    def __init__(self, args: RunConfig, build: Callable[[str, str], TrainedModel]) -> None:
        """build(source, flag): a model of the actor's kind from a checkpoint."""
        self._args, self._build = args, build
        self.loaded: dict[Part, TrainedModel] = {}

    @contextmanager
    def reference(self, trained: TrainedModel) -> Iterator[TrainedModel]:
        """The reference, for a while: the trained actor itself with its adapters off, where they were put on that very model."""
        args = self._args
        if args.lora_rank and isinstance(trained, PolicyModel) and args.ref_checkpoint in (None, args.hf_checkpoint):
            with adapters_off(trained):
                yield trained
        else:
            yield self.get("reference")

    def get(self, part: Part) -> TrainedModel:
        if part not in self.loaded:
            own = self._args.ref_checkpoint if part == "reference" else self._args.teacher_checkpoint
            setting = ("--ref-checkpoint" if part == "reference" else "--teacher-checkpoint") if own else "--hf-checkpoint"
            source = resolve_checkpoint(own or self._args.hf_checkpoint, self._args.seed)
            if part == "teacher":
                self._check_tokenizer(source)
            self.loaded[part] = self._build(source, setting).requires_grad_(False)
        return self.loaded[part]

    def _check_tokenizer(self, teacher: str) -> None:
        """Raises ValueError where the teacher would read other words in the same ids."""
        own, others = (self._vocabulary(path) for path in (resolve_checkpoint(self._args.hf_checkpoint, self._args.seed), teacher))
        if own != others:
            different = len(own.items() ^ others.items())
            raise ValueError(f"--teacher-checkpoint: its tokenizer is not that of --hf-checkpoint ({different} entries differ)")

    def _vocabulary(self, checkpoint: str) -> dict[str, Any]:
        return load_tokenizer(self._args.model_copy(update={"hf_checkpoint": checkpoint})).get_vocab()

    def move(self, device: torch.device) -> None:
        for model in self.loaded.values():
            offload.move(model, None, device)
