"""What a worker is told at birth: which plain class, which resources, and how long each of its calls may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Limit(NamedTuple):
    """How long a call may take, and the flag that says so."""

    seconds: float
    setting: str


_START = Limit(180.0, "--worker-start-timeout")
_CALL = Limit(600.0, "")


@dataclass(frozen=True)
class WorkerSpec:
    """One worker.

    Example: WorkerSpec("engine-0", "miles.engines.embedded.engine.EmbeddedEngine", {"args": args, "name": "engine-0"}, num_cpus=1).
    """

    name: str
    cls: str  # dotted path, loaded inside the worker
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    kind: str = ""  # "trainer", "engine", ...: workers of one `apart` kind never share a GPU
    apart: bool = False
    num_cpus: float = 0.0
    num_gpus: float = 0.0
    env: Mapping[str, str] = field(default_factory=dict)
    start: Limit = _START
    limits: Mapping[str, Limit] = field(default_factory=dict)  # by method
    default_limit: Limit = _CALL

    def limit(self, method: str) -> Limit:
        """How long a call may take; "start" is the start of the process and its object."""
        return self.start if method == "start" else self.limits.get(method, self.default_limit)
