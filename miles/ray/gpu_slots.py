"""Which worker sits where: GPU slots of one GPU each (shared by fractions), or CPU slots."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from miles.ray.worker_spec import WorkerSpec

_ROUNDING = 1e-6
_SHARING = " (0.5 and 0.4 let a trainer and an engine share one GPU)"


@dataclass
class Slot:
    """One bundle of a placement group: `gpus` whole GPUs (0: a CPU slot), and the workers in it."""

    gpus: int
    cpus: float = 0.0
    used: float = 0.0
    workers: list[str] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)

    def takes(self, spec: WorkerSpec) -> bool:
        """Ranks of one collective cannot share a GPU; a trainer and an engine can."""
        return spec.num_gpus <= 1 and self.used + spec.num_gpus <= self.gpus + _ROUNDING and not (spec.apart and spec.kind in self.kinds)


def plan(specs: Sequence[WorkerSpec]) -> tuple[list[Slot], dict[str, int]]:
    """Slots for all workers of a run, and each worker's slot. Fractions fill a GPU in the order of `specs`.

    Example: trainer 0.5 and engine 0.4 -> one slot of one GPU; trainer 1.0 and engine 1.0 -> two.
    """
    slots: list[Slot] = []
    place: dict[str, int] = {}
    for spec in specs:
        index = next((i for i, slot in enumerate(slots) if spec.num_gpus > 0 and slot.gpus and slot.takes(spec)), len(slots))
        if index == len(slots):
            slots.append(Slot(math.ceil(spec.num_gpus)))
        slot = slots[index]
        slot.cpus += spec.num_cpus
        slot.used += spec.num_gpus
        slot.workers.append(spec.name)
        slot.kinds.add(spec.kind)
        place[spec.name] = index
    return slots, place


def bundles(slots: Sequence[Slot]) -> list[dict[str, float]]:
    """The slots as Ray bundles. A slot that needs nothing still is one: Ray asks for a positive amount."""
    return [
        {name: amount for name, amount in (("CPU", slot.cpus), ("GPU", float(slot.gpus))) if amount} or {"CPU": 0.001} for slot in slots
    ]


def refuse_if_too_many(slots: Sequence[Slot], specs: Sequence[WorkerSpec], free: dict[str, float], total: dict[str, float]) -> None:
    """Say at once, in numbers, what is missing.

    Raises:
        ValueError: the run needs more GPUs or CPU slots than the machines have free.
    """
    for resource, need, flags in (
        ("GPU", float(sum(slot.gpus for slot in slots)), "--num-trainers, --num-engines, --gpus-per-trainer, --gpus-per-engine"),
        ("CPU", sum(slot.cpus for slot in slots), "--num-trainers, --num-engines, --cpus-per-trainer, --cpus-per-engine"),
    ):
        have = free.get(resource, 0.0)
        if need > have + _ROUNDING:
            kinds = Counter(spec.kind for spec in specs)
            workers = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
            if resource == "GPU" and not total.get("GPU"):
                raise ValueError(f"--device: the run asks for {need:g} GPUs ({workers}) and there is none here; --device cpu runs without")
            raise ValueError(
                f"not enough {resource} slots: the run needs {need:g} ({workers}), {have:g} of {total.get(resource, 0.0):g} are free. "
                f"Lower {flags}{_SHARING if resource == 'GPU' else ''}, or join a larger cluster with --ray-address"
            )
