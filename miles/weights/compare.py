"""Two tables of checksums, compared. Needs no torch: the driver does it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Comparison:
    """How what arrived differs from what was sent. Names are in the order of the sender."""

    differing: tuple[str, ...]  # on both ends, with different checksums
    missing: tuple[str, ...]  # sent, and not there
    extra: tuple[str, ...]  # there, and never sent

    @property
    def equal(self) -> bool:
        return not (self.differing or self.missing or self.extra)

    def __str__(self) -> str:
        if self.equal:
            return "all tensors are equal"
        kinds = (("differ", self.differing), ("are missing", self.missing), ("were never sent", self.extra))
        return "; ".join(f"{len(names)} {what}: {_shortened(names)}" for what, names in kinds if names)


def compare_checksums(sent: Mapping[str, str], received: Mapping[str, str]) -> Comparison:
    """Compare the trainer's table with an engine's, both tensor name -> checksum of one kind."""
    return Comparison(
        differing=tuple(name for name, value in sent.items() if name in received and received[name] != value),
        missing=tuple(name for name in sent if name not in received),
        extra=tuple(name for name in received if name not in sent),
    )


def _shortened(names: tuple[str, ...], limit: int = 8) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown}, and {len(names) - limit} more"
