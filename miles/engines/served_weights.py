"""The weights that an engine computes with: changed in place, checksummed, compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from miles.types import PublishPlan
from miles.weights.checksum import checksum, kind_for
from miles.weights.receiver import WeightLoader, Write

SKIPPED = "skipped: "
"""Starts the finding of a tensor that is reported but not compared."""

QUANTISED = {torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8}


class ServedWeights:
    """A model's parameters under their Hugging Face names, tied ones once.

    `intact` is False from the first byte that is written until a whole publish has ended: the weights are of two versions then. A
    publish that has ended can still be found wrong by the other end, until the engine is resumed (`proven`).
    """

    def __init__(self, parameters: Mapping[str, Tensor], timeout: float, write: Write | None = None) -> None:
        """
        Args:
            parameters: name -> live parameter, or a view into one.
            timeout: seconds that a transport waits for the other end.
            write: puts received tensors into place; default: each is copied into its parameter.
        """
        self.parameters = dict(parameters)
        self._write = write
        self.intact = True
        self._unproven = False
        self.plan: PublishPlan | None = None
        self._timeout = timeout
        self._loader: WeightLoader | None = None
        self._snapshot: dict[str, Tensor] = {}

    def moved(self, parameters: Mapping[str, Tensor]) -> None:
        """The same parameters lie elsewhere now."""
        self.dispose()
        self.parameters = dict(parameters)

    def begin(self, plan: PublishPlan, receiver_rank: int) -> None:
        if self._loader is None:
            self._loader = WeightLoader(self.parameters, timeout=self._timeout, write=self._write)
        self._loader.begin(plan, receiver_rank)
        self.plan = plan

    def receive(self, index: int) -> None:
        assert self._loader is not None, "receive_bucket before begin_update"
        self.intact = False
        self._loader.receive(index)

    def finish(self) -> dict[str, str]:
        """Returns the checksums, read from the live parameters; {} where the plan asks for none. Takes what a staged plan has ready."""
        assert self._loader is not None, "end_update before begin_update"
        assert self.plan is not None, "end_update before begin_update"
        if self.plan.staged:
            self.intact = False
        checksums = self._loader.finish()
        self.intact, self._unproven, self.plan = True, True, None
        return checksums

    def proven(self) -> None:
        """The engine is resumed: nobody has found fault with the last publish."""
        self._unproven = False

    def abort(self) -> None:
        self.plan = None
        if self._unproven:
            self.intact = self._unproven = False
        if self._loader is not None:
            self._loader.abort()

    def dispose(self) -> None:
        if self._loader is not None:
            self._loader.dispose()
        self._loader = None

    def check(
        self, action: str, *, selector: str = "all", skip_list: Sequence[str] = (), allow_quant_error: bool = False, seed: int = 0
    ) -> dict[str, str]:
        """One action of check_weights.

        Args:
            action: snapshot (remember a copy), reset_tensors (random values, so that a publish that leaves one out is found),
                compare (with the snapshot), checksum.
            selector: all, target or draft; this engine has a target only.
            skip_list: tensors whose name contains one of these are reported by compare, not judged.
            allow_quant_error: elements of a quantised tensor (8 bits) may differ by one unit in the last place.
            seed: of reset_tensors.

        Returns:
            compare: what differs, by name, and how; a skipped tensor's finding starts with "skipped: ". checksum: by name. Else {}.
        """
        if selector not in ("all", "target", "draft"):
            raise ValueError(f"check_weights selector {selector!r} is none of all, target, draft")
        actions: dict[str, Callable[[], dict[str, str]]] = {
            "snapshot": self.snapshot,
            "reset_tensors": lambda: self._reset(seed),
            "compare": lambda: self._compare(skip_list, allow_quant_error),
            "checksum": self._checksum,
        }
        if action not in actions:
            raise ValueError(f"check_weights action {action!r} is none of {', '.join(actions)}")
        return {} if selector == "draft" else actions[action]()

    def snapshot(self) -> dict[str, str]:
        """Remember a copy of every tensor, in host memory."""
        self._snapshot = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.parameters.items()}
        return {}

    @torch.no_grad()
    def _reset(self, seed: int) -> dict[str, str]:
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.parameters.values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.02)
        return {}

    def _compare(self, skip_list: Sequence[str], allow_quant_error: bool) -> dict[str, str]:
        if not self._snapshot:
            raise ValueError("check_weights compare: there is no snapshot to compare with")
        found = {}
        for name, tensor in self.parameters.items():
            expected, own = self._snapshot[name], tensor.detach().cpu()
            if torch.equal(own.double(), expected.double()):
                continue
            if allow_quant_error and own.dtype in QUANTISED and int((_ordinal(own) - _ordinal(expected)).abs().max()) <= 1:
                continue
            gap = (own.double() - expected.double()).abs()
            how = f"{int((gap != 0).sum())} of {own.numel()} elements differ, by at most {float(gap.max()):.3g}"
            found[name] = (SKIPPED if any(part in name for part in skip_list) else "") + how
        return found

    def _checksum(self) -> dict[str, str]:
        return {name: checksum(tensor, kind_for(tensor.device)) for name, tensor in self.parameters.items()}


def _ordinal(tensor: Tensor) -> Tensor:
    """The place of each 8-bit value among all values of its type: neighbours differ by 1."""
    if not tensor.is_floating_point():
        return tensor.to(torch.int16)
    bits = tensor.view(torch.uint8).to(torch.int16)
    return torch.where(bits >= 128, 128 - bits, bits)  # sign and magnitude; both zeros are one
