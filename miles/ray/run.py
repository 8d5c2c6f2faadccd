"""One run in the driver's process: what its parts share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from miles.config.run_config import RunConfig
from miles.ray.checkpoints import Checkpoints
from miles.ray.guard import RunGuard
from miles.ray.heartbeat import Heartbeat
from miles.ray.starting import Starting
from miles.ray.worker_manager import WorkerManager


@dataclass
class Run:
    """Made by `wiring.launch`. The driver's functions are given the settings alone, so the run is found through `current`."""

    args: RunConfig
    manager: WorkerManager
    guard: RunGuard
    checkpoints: Checkpoints
    resolved: dict[str, str] = field(default_factory=dict)  # settings that workers get resolved: a random model's path, the device
    starting: Starting | None = None
    keeper: asyncio.Task[None] | None = None
    heartbeat: Heartbeat | None = None
    trained_through: int | None = None  # last rollout whose training is done, of this process
    open_rollout: int | None = None  # its training has begun, and not all roles are done with it
    published: int | None = None  # rollout after which the last publish was; None: the first one, or none yet
    trainers_idle: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while a rollout is trained
    per_epoch: int | None = None  # rollouts, where their number comes from epochs
    save_all: Callable[[int], Awaitable[None]] | None = None  # saves every part; there once the parts are

    def worker_args(self) -> RunConfig:
        """The settings as workers get them, with what was filled in so far."""
        return self.args.model_copy(update=self.resolved)


_current: Run | None = None


def current() -> Run:
    assert _current is not None, "init_orchestration_script comes first"
    return _current


def set_current(run: Run | None) -> None:
    global _current
    _current = run


def current_or_none() -> Run | None:
    return _current
