"""The thread of each process that says, every few seconds, what the process does and waits for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from miles.tracking import waits
from miles.tracking.waits import Beat

logger = logging.getLogger(__name__)

PERIOD = 2.0


class Heartbeat:
    """Writes a beat for each of `beats(with_stacks)` into `folder`.

    A thread of its own: it speaks while the process computes, and falls silent with it.
    """

    def __init__(self, folder: Path, beats: Callable[[bool], Iterable[Beat]], name: str) -> None:
        self._folder, self._beats = folder, beats
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{name} heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(PERIOD)

    def _run(self) -> None:
        while self._beat() and not self._stop.wait(PERIOD):
            pass

    def _beat(self) -> bool:
        """Say it now. Returns whether that worked."""
        try:
            for beat in self._beats(self._stacks_are_asked_for()):
                waits.write(self._folder, beat)
        except OSError as error:
            logger.warning("no more signs of life in %s: %s", self._folder, error)
            return False
        return True

    def _stacks_are_asked_for(self) -> bool:
        """For a while: every process answers in a beat of its own, and all of them are to be read together."""
        try:
            return time.time() - (self._folder / waits.ASKED).stat().st_mtime < 5 * PERIOD
        except FileNotFoundError:
            return False
