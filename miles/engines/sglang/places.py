"""Where each tensor of a Hugging Face checkpoint lies inside a server's parameters.

SGLang fuses some tensors (q, k and v; gate and up), pads others, and gives each rank a part. How, only each model's own
`load_weights` knows. So it is asked: it loads tensors that have a shape and no data, and every copy that it would make is
noted instead of made. What is read through these places afterwards is what the server computes with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

NamedShape = tuple[str, str, tuple[int, ...]]
"""Name, type ("bfloat16"), full shape."""


class Place(NamedTuple):
    """One tensor, or this rank's part of it."""

    target: Tensor  # a view into a live parameter
    offset: int  # where the part begins in the full tensor, in elements
    stride: tuple[int, ...]  # and how it lies there
    whole: bool  # it is all of the tensor


class Places(dict[str, Place]):
    """Place by Hugging Face name. `copied`: the model does nothing else with these tensors than to copy each whole to its one place."""

    copied = False

    def views(self) -> dict[str, Tensor]:
        return {name: place.target for name, place in self.items()}


def find_places(model: nn.Module, tensors: Sequence[NamedShape]) -> Places:
    """
    Raises:
        ValueError: names tensors that the model does not take as they are, so that nothing can be said about them.
    """
    recorder = _Recorder()

    def without_data() -> Iterator[tuple[str, Tensor]]:
        for name, dtype, shape in tensors:
            recorder.name = name
            yield name, torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

    with torch.no_grad(), recorder:
        model.load_weights(without_data())  # type: ignore[operator]
    found, odd = Places(), []
    found.copied = all(len(copies) == 1 and copies[0][0].dtype == copies[0][1].dtype for copies in recorder.copies.values())
    for name, _, shape in tensors:
        copies = recorder.copies.get(name, [])
        sizes = {tuple(target.shape) == tuple(source.shape) for target, source in copies}
        if not copies or sizes != {True}:
            odd.append(name)
            continue
        target, source = copies[0]
        found[name] = Place(target.detach(), int(source.storage_offset()), source.stride(), source.shape == torch.Size(shape))
    found.copied = found.copied and all(place.whole for place in found.values())
    if odd:
        more = f" and {len(odd) - 8} more" if len(odd) > 8 else ""
        raise ValueError(f"{type(model).__name__} of SGLang does not keep these tensors as they come: {', '.join(odd[:8])}{more}")
    return found


class _Recorder(TorchFunctionMode):
    """Notes copies of tensors without data, under the name that was asked for last."""

    def __init__(self) -> None:
        super().__init__()
        self.name = ""
        self.copies: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_ and args[1].is_meta:
            self.copies.setdefault(self.name, []).append((args[0], args[1]))
            return args[0]
        return func(*args, **(kwargs or {}))
