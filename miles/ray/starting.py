"""What the start of a run waits for, said while it is waited for: workers import and load for seconds to minutes, without a word."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from miles.ray.worker_handle import waiting_for
from miles.ray.worker_manager import WorkerManager
from miles.tracking.waits import DRIVER

logger = logging.getLogger(__name__)

FIRST_SECONDS, EVERY_SECONDS = 10.0, 15.0
DOING = {"start": "start", "init": "load what it needs"}
WORTH_SAYING = 2.0  # seconds that a call has taken


class Starting:
    """From the launch until all workers are up. Runs in the driver's loop."""

    def __init__(self, manager: WorkerManager, since: float) -> None:
        """`since`: when the start began, by time.monotonic."""
        self._manager, self._since = manager, since
        self._task: asyncio.Task[None] | None = None

    def begin(self, say: Callable[[str], None] = logger.info, *, first: float = FIRST_SECONDS, every: float = EVERY_SECONDS) -> None:
        """Say every few seconds what is waited for, until `up` or `stop`."""
        self._task = asyncio.get_running_loop().create_task(self._tell(say, first, every), name="what the start waits for")

    def up(self) -> None:
        """All workers are up. Said once."""
        self.stop()
        names = ", ".join(handle.worker_name for handle in self._manager.handles)
        logger.info("all workers are up after %.1f s: %s", time.monotonic() - self._since, names)

    def stop(self) -> None:
        """Idempotent."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _tell(self, say: Callable[[str], None], first: float, every: float) -> None:
        await asyncio.sleep(first)
        while True:
            if text := waited_for(self._manager, time.time()):
                say(text)
            await asyncio.sleep(every)


def waited_for(manager: WorkerManager, now: float) -> str:
    """Example: waiting for engine-0 to load what it needs (12 s so far; limit 300 s by --engine-start-timeout): runs/x/logs/engine-0.log

    "" when nothing has been waited for that is worth saying. `now`: seconds since the epoch.
    """
    parts = []
    for call in waiting_for(DRIVER):
        spec = manager.spec(call.worker)
        if now - call.since < WORTH_SAYING or spec is None:
            continue
        limit = spec.limit(call.method)
        setting = f" by {limit.setting}" if limit.setting else ""
        doing = DOING.get(call.method, f"answer to {call.method}")
        log = _newest_log(Path(manager.log_path(spec)))
        parts.append(f"{call.worker} to {doing} ({now - call.since:.0f} s so far; limit {limit.seconds:g} s{setting}): {log}")
    return "waiting for " + "; ".join(parts) if parts else ""


def _newest_log(log: Path) -> str:
    """The log of a worker, or of a server that it started, whichever was written to last, as a path from here where that is shorter."""
    logs = [path for path in (log, *log.parent.glob(f"{log.stem}-*.log")) if path.exists()] or [log]
    newest = max(logs, key=lambda path: path.stat().st_mtime if path.exists() else 0.0)
    return min(str(newest), os.path.relpath(newest), key=len)
