"""The weights of the last publish, kept beside the trained ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from miles.config.run_config import RunConfig
from miles.train.sharding import local
from miles.types import Role


class PublishedWeights:
    """A copy of this rank's part of every trained parameter: the ratio's base of --keep-old-actor; what an engine that is started again, or
    a resumed run, must get while newer weights wait for their publish."""

    @torch.no_grad()
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.kept: dict[str, Tensor] = {name: parameter.detach().clone() for name, parameter in self._trained()}

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad)

    @torch.no_grad()
    def refresh(self) -> None:
        """Called at every publish: from here on the kept weights are the current ones."""
        for name, parameter in self._trained():
            local(self.kept[name]).copy_(local(parameter.detach()))

    def hf(self) -> dict[str, Tensor]:
        """What is kept of the Hugging Face model's parameters, by their names in it."""
        return {name.removeprefix("hf."): kept for name, kept in self.kept.items() if name.startswith("hf.")}

    def move(self, device: torch.device) -> None:
        """Follow the model to host memory and back."""
        self.kept = {name: kept.to(device) for name, kept in self.kept.items()}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model computes with the kept weights."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, parameter in self._trained():
            own, kept = local(parameter.detach()), local(self.kept[name])
            moved = own.clone()
            own.copy_(kept)
            kept.copy_(moved)


def keeps_published(args: RunConfig, role: Role) -> bool:
    """Whether the last publish's weights can differ from the current ones when they are wanted."""
    return role == "actor" and (args.keep_old_actor or args.update_weights_interval > 1)
