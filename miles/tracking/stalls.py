"""When nothing moves for long: who waits for whom, and where."""

import logging
import sys
import threading
import traceback
from collections.abc import Callable

from miles.tracking.clock import now
from miles.tracking.timeline import Timeline

logger = logging.getLogger(__name__)


class StallWatch:
    """A thread that looks at the timeline and speaks up, once per `timeout` seconds in which no span began or ended.

    `who_waits` tells who waits for whom, with the stacks of the workers concerned; it is called in that thread, may take its time,
    and may fail.
    """

    def __init__(self, timeline: Timeline, timeout: float, clock: Callable[[], float] = now) -> None:
        self.timeline = timeline
        self.timeout = timeout
        self.who_waits: Callable[[], str] | None = None
        self._clock = clock
        self._said = timeline.changed
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stall-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Idempotent; waits only a moment for a report that is being written."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(1.0)

    def look(self) -> str | None:
        """What to say now, if anything."""
        moment = self._clock()
        since = max(self._said, self.timeline.changed)
        if moment - since < self.timeout:
            return None
        self._said = moment
        return report(self.timeline, moment, self.who_waits)

    def _run(self) -> None:
        while not self._stop.wait(min(self.timeout / 4, 10.0)):
            if (said := self.look()) is not None:
                logger.warning("%s", said)


def report(timeline: Timeline, moment: float, who_waits: Callable[[], str] | None) -> str:
    """What the run waits for, for how long, and where."""
    running = [f"  {span.worker}: {span.name} {span.args or ''} for {moment - span.start:.0f} s" for span in timeline.running()]
    parts = [f"no progress for {moment - timeline.changed:.0f} s. Running:", *(running or ["  nothing"])]
    if who_waits is not None:
        try:
            return "\n".join([*parts, "Who waits for whom:", who_waits()])
        except (OSError, RuntimeError, ValueError) as error:
            parts.append(f"the workers did not tell: {type(error).__name__}: {error}")
    return "\n".join([*parts, "The driver's stacks:", driver_stacks()])


def driver_stacks() -> str:
    """The stack of every other thread of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != threading.get_ident()}
    return "\n".join(f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames.items())
