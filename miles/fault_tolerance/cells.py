"""Cells: what is suspended and resumed as one (an engine), or only looked at (a trainer group); Kubernetes-like objects."""

import threading
import time
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

Phase = Literal["Pending", "Running", "Suspended"]
Status = Literal["True", "False", "Unknown"]
ConditionType = Literal["Allocated", "Healthy", "Serving"]
FaultKind = Literal["kill", "hang", "unhealthy"]
"""kill: end the worker's process. hang: it stays and answers nothing. unhealthy: it says that it is not."""


class _View(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid")


class Condition(_View):
    """One thing that is known of a cell; Unknown is not False."""

    type: ConditionType
    status: Status
    reason: str = ""
    last_transition_time: str = ""


class Metadata(_View):
    """`resource_version` changes whenever anything about the cell does; a stale one is refused."""

    name: str
    resource_version: str
    labels: dict[str, str] = {}


class Spec(_View):
    suspend: bool


class Load(_View):
    """What an engine has to do, and its tokens since it started, as its last probe said."""

    running: int
    waiting: int
    tokens: int
    tokens_cut: int


class CellStatus(_View):
    phase: Phase
    conditions: list[Condition]
    weight_version: int | None = None
    load: Load | None = None


class Cell(_View):
    """A snapshot of one cell. Example: cell.status.phase == "Running", cell.condition("Healthy").status == "True"."""

    metadata: Metadata
    spec: Spec
    status: CellStatus

    @property
    def name(self) -> str:
        return self.metadata.name

    def condition(self, kind: ConditionType) -> Condition:
        return next(condition for condition in self.status.conditions if condition.type == kind)


class CellSource(Protocol):
    """Who has cells to show: a trainer group."""

    def cells(self) -> list[Cell]:
        """Called for every look, from another thread: a snapshot, at once."""
        ...


class CellOwner(CellSource, Protocol):
    """Who has cells to act on: the inference controller."""

    async def suspend_cell(self, name: str) -> None:
        """Called on the driver's loop. Waits for a publish that is under way; idempotent. KeyError: no such cell."""
        ...

    async def resume_cell(self, name: str) -> None:
        """As suspend_cell. Sets phase Pending and Healthy Unknown before its first wait; returns when the cell serves, or raises."""
        ...

    async def inject_fault(self, name: str, kind: FaultKind) -> None:
        """Called on the driver's loop, to test recovery."""
        ...


@dataclass(slots=True)
class CellState:
    """The state of one cell, for its owner: `change` it, `view` it from any thread.

    Example:
        state = CellState("engine-0", {"role": "engine"})
        state.change(phase="Running", healthy=("True", ""), serving=("True", ""), weight_version=3)
    """

    name: str
    labels: dict[str, str] = field(default_factory=dict)
    suspend: bool = False
    phase: Phase = "Pending"
    weight_version: int | None = None
    load: Load | None = None  # set freely: it changes all the time, and no resource version with it
    version: int = 0
    conditions: dict[ConditionType, Condition] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        for kind in ("Allocated", "Healthy", "Serving"):
            self.conditions[kind] = Condition(type=kind, status="Unknown", reason="not looked at yet", last_transition_time=_now())

    def change(
        self,
        *,
        suspend: bool | None = None,
        phase: Phase | None = None,
        weight_version: int | None = None,
        allocated: tuple[Status, str] | None = None,
        healthy: tuple[Status, str] | None = None,
        serving: tuple[Status, str] | None = None,
    ) -> None:
        """Set what is given; a condition is (status, reason). The resource version grows only when something differs."""
        with self._lock:
            before = self._content()
            self.suspend = self.suspend if suspend is None else suspend
            self.phase = phase or self.phase
            self.weight_version = self.weight_version if weight_version is None else weight_version
            conditions: tuple[tuple[ConditionType, tuple[Status, str] | None], ...] = (
                ("Allocated", allocated),
                ("Healthy", healthy),
                ("Serving", serving),
            )
            for kind, said in conditions:
                if said is not None:
                    old = self.conditions[kind]
                    since = old.last_transition_time if old.status == said[0] else _now()
                    self.conditions[kind] = Condition(type=kind, status=said[0], reason=said[1], last_transition_time=since)
            self.version += self._content() != before

    def view(self) -> Cell:
        """A snapshot."""
        with self._lock:
            status = CellStatus(
                phase=self.phase, conditions=list(self.conditions.values()), weight_version=self.weight_version, load=self.load
            )
            metadata = Metadata(name=self.name, resource_version=str(self.version), labels=dict(self.labels))
            return Cell(metadata=metadata, spec=Spec(suspend=self.suspend), status=status)

    def _content(self) -> tuple[object, ...]:
        told = tuple((condition.status, condition.reason) for condition in self.conditions.values())
        return (self.suspend, self.phase, self.weight_version, told)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
