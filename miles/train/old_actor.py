"""The weights of the last publish, kept beside the trained ones: the ratio's base of --keep-old-actor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from miles.train.sharding import local


class OldActor:
    """A copy of this rank's part of every parameter."""

    @torch.no_grad()
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.kept: list[Tensor] = [local(parameter.detach()).clone() for parameter in model.parameters()]

    @torch.no_grad()
    def refresh(self) -> None:
        """Called at every publish: from here on the kept weights are the current ones."""
        for kept, parameter in zip(self.kept, self.model.parameters(), strict=True):
            kept.copy_(local(parameter.detach()))

    def move(self, device: torch.device) -> None:
        """Follow the model to host memory and back."""
        self.kept = [kept.to(device) for kept in self.kept]

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
        for kept, parameter in zip(self.kept, self.model.parameters(), strict=True):
            own = local(parameter.detach())
            moved = own.clone()
            own.copy_(kept)
            kept.copy_(moved)
