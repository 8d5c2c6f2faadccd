"""When an engine counts as unhealthy: what probes say, weighed so that a slow engine is not a dead one."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

from miles.types import EngineHealth

logger = logging.getLogger(__name__)


class Verdict(StrEnum):
    """The values are those of a cell's condition Healthy."""

    HEALTHY = "True"
    UNHEALTHY = "False"
    UNKNOWN = "Unknown"


@dataclass(frozen=True, slots=True)
class Probe:
    """One probe on its way; `epoch` tells whether a pause or restart came between."""

    epoch: int
    sent: float


class HealthJudge:
    """Weighs the probes of one engine. Pure: every method takes the time.

    - Cold start: until the first good probe, failures within `grace` seconds of `start` count for nothing.
    - `failures` failed probes in a row make it unhealthy; a good one makes it healthy at once.
    - A probe that answers but whose oldest request has had no token for `stuck` seconds makes it unhealthy at once: a health that is
      good while nothing is generated is worth nothing.
    - Between `pause` and `resume` (a publish, an offload) nothing counts, nor does a probe that was sent before either of them.
    """

    def __init__(self, *, failures: int, stuck: float, grace: float) -> None:
        self.failures = failures
        self.stuck = stuck
        self.grace = grace
        self.verdict = Verdict.UNKNOWN
        self.reason = "not started"
        self.gone = False  # beyond doubt: there is no process behind it
        self._epoch = 0
        self._failed = 0
        self._paused = False
        self._cold_until: float | None = None

    def start(self, now: float) -> None:
        """The engine is started, or started again."""
        self._epoch += 1
        self._failed = 0
        self._paused = False
        self._cold_until = now + self.grace
        self.verdict, self.reason, self.gone = Verdict.UNKNOWN, "starting", False

    def pause(self) -> None:
        """From now on silence means nothing. Idempotent."""
        self._epoch += 1
        self._paused = True

    def resume(self) -> None:
        """Idempotent. Failures from before the pause are forgotten; the verdict stands until a probe changes it."""
        self._epoch += 1
        self._paused = False
        self._failed = 0

    def send(self, now: float) -> Probe | None:
        """Called before a probe; None: do not send one now."""
        return None if self._paused else Probe(self._epoch, now)

    def good(self, probe: Probe, health: EngineHealth) -> Verdict:
        """The engine answered."""
        if probe.epoch != self._epoch:
            return self.verdict
        if not health.healthy:
            return self.bad(probe, probe.sent, health.reason or "the engine says that it is not healthy")
        if health.stuck_seconds >= self.stuck and not health.paused:
            self.verdict = Verdict.UNHEALTHY
            self.reason = f"no token for {health.stuck_seconds:.0f} s with {health.running} requests running"
            return self.verdict
        self._failed = 0
        self._cold_until = None
        self.verdict, self.reason = Verdict.HEALTHY, ""
        return self.verdict

    def bad(self, probe: Probe, now: float, reason: str, *, fatal: bool = False) -> Verdict:
        """The engine did not answer, or said no. `fatal`: there is no doubt, its process is gone."""
        if probe.epoch != self._epoch:
            return self.verdict
        if fatal:
            self.verdict, self.reason, self.gone = Verdict.UNHEALTHY, reason, True
            return self.verdict
        if self._cold_until is not None and now < self._cold_until:
            self.reason = f"starting: {reason}"
            return self.verdict
        self._failed += 1
        if self._failed >= self.failures:
            self.verdict, self.reason = Verdict.UNHEALTHY, f"{self._failed} probes failed, the last: {reason}"
        return self.verdict


async def watch(
    judge: HealthJudge,
    probe: Callable[[], Awaitable[EngineHealth]],
    *,
    interval: float,
    timeout: float,
    on_verdict: Callable[[Verdict, str], None],
    fatal: tuple[type[BaseException], ...] = (),
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Probe one engine until cancelled.

    Consumes answers of `probe`; produces `on_verdict(verdict, reason)` whenever either changes; waits `interval` seconds between two
    probes and at most `timeout` for one. Errors of a probe are failures, those in `fatal` beyond doubt.
    """
    said: tuple[Verdict, str] | None = None
    while True:
        sent = judge.send(clock())
        if sent is not None:
            try:
                judge.good(sent, await asyncio.wait_for(probe(), timeout))
            except fatal as error:
                judge.bad(sent, clock(), f"{type(error).__name__}: {error}", fatal=True)
            except TimeoutError:
                judge.bad(sent, clock(), f"no answer within {timeout:g} s")
            except (OSError, RuntimeError, ValueError) as error:
                judge.bad(sent, clock(), f"{type(error).__name__}: {error}")
        if (judge.verdict, judge.reason) != said:
            said = (judge.verdict, judge.reason)
            on_verdict(*said)
        await sleep(interval)
