"""Asks every worker what it does and waits for, and follows the chain."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

from miles.ray.worker_handle import waiting_for
from miles.ray.worker_manager import WorkerManager
from miles.tracking import tracking, waits
from miles.tracking.stalls import driver_stacks
from miles.tracking.waits import DRIVER, Beat


def driver_beat(with_stacks: bool = False) -> Beat:
    """What the driver waits for. Where that is no worker, its running spans say more."""
    spans = [f"{span.worker}: {span.name} {span.args or ''}".rstrip() for span in tracking.timeline().running()]
    called = waiting_for(DRIVER)
    return Beat(DRIVER, waits=called, notes=[] if called else spans, stacks=driver_stacks() if with_stacks else "")


def beats_here(manager: WorkerManager, with_stacks: bool) -> Iterator[Beat]:
    """Of the driver, and of the workers that live in its process. May be called from any thread."""
    yield driver_beat(with_stacks)
    for host in manager.hosts:
        yield host.beat(with_stacks)


async def report(manager: WorkerManager, logs: Path) -> str:
    """Who waits for whom, and the stacks of the workers at the ends of the chain. Never raises for a silent worker."""
    driver, handles = driver_beat(), manager.handles
    beats = waits.read(logs)  # what a silent worker last said
    for handle, beat in zip(handles, await asyncio.gather(*(handle.worker_beat() for handle in handles)), strict=True):
        if beat is not None:
            beats[handle.worker_name] = beat
    found = waits.chain(beats | {DRIVER: driver}, time.time())
    ends = [handle for handle in handles if handle.worker_name in found.ends]
    stacks = dict(zip([end.worker_name for end in ends], await asyncio.gather(*(end.worker_stacks() for end in ends)), strict=True))
    held_up = waits.held_up_by(stacks)
    if DRIVER in found.ends:
        stacks[DRIVER] = driver_stacks()
    return "\n".join([found.sentence, *([held_up] if held_up else []), *found.lines, *(f"\n{text}" for text in stacks.values())])
