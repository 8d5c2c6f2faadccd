"""A small healer: a client of the control API that suspends and resumes cells that are not well."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import httpx

from miles.config.fault_tolerance import FaultToleranceSection
from miles.fault_tolerance.cells import Cell
from miles.fault_tolerance.retry import backoff

logger = logging.getLogger(__name__)


class Action(NamedTuple):
    """Set `spec.suspend` of a cell."""

    cell: str
    suspend: bool


@dataclass(slots=True)
class Case:
    """What the healer knows of one cell."""

    stage: Literal["idle", "suspended", "resumed", "given_up"] = "idle"
    due: float = 0.0  # idle: not to be touched before; suspended: to be resumed at
    failures: int = 0  # in a row


@dataclass(slots=True)
class Healer:
    """Decides; pure, every method takes the time.

    A cell with condition Healthy False, or in phase Suspended, is suspended, and resumed `resume_delay` seconds later. Healthy True
    after that is a success: the cell is left alone for `cooldown` seconds. Otherwise it is a failure: the next attempt waits
    min(5 x 2^n, 300) s, and after `max_failures` of them in a row the healer gives the cell up and says so. Unknown is not sick: it
    is waited for.
    """

    resume_delay: float
    cooldown: float
    max_failures: int
    cases: dict[str, Case] = field(default_factory=dict)

    def decide(self, cells: list[Cell], now: float) -> list[Action]:
        """What to do about these cells. Each action's outcome comes back through `done` or `failed`."""
        actions = []
        for cell in cells:
            case = self.cases.setdefault(cell.name, Case())
            healthy = cell.condition("Healthy").status
            sick = healthy == "False" or cell.status.phase == "Suspended"
            if case.stage == "suspended" and now >= case.due:
                actions.append(Action(cell.name, suspend=False))
            elif case.stage == "resumed" and sick:
                self.failed(cell.name, now, cell.condition("Healthy").reason or cell.status.phase)
            elif case.stage == "resumed" and healthy == "True":
                self.cases[cell.name] = Case(due=now + self.cooldown)
                logger.info("%s is well again", cell.name)
            elif case.stage == "idle" and sick and now >= case.due:
                actions.append(Action(cell.name, suspend=True))
            elif case.stage == "given_up" and healthy == "True" and not sick:
                self.cases[cell.name] = Case()
        return actions

    def done(self, action: Action, now: float) -> None:
        """The API took the action."""
        case = self.cases[action.cell]
        case.stage = "suspended" if action.suspend else "resumed"
        case.due = now + self.resume_delay

    def failed(self, cell: str, now: float, reason: str) -> None:
        """The API refused an action, or the cell was sick again after its resume."""
        case = self.cases[cell]
        wait = backoff(case.failures)
        case.failures += 1
        if case.failures >= self.max_failures:
            case.stage = "given_up"
            logger.error("%s: giving it up after %d failed attempts, the last: %s", cell, case.failures, reason)
            return
        case.stage, case.due = "idle", now + wait
        logger.warning("%s: attempt %d failed (%s); the next in %.0f s", cell, case.failures, reason, wait)


class MiniFtController:
    """Looks, decides and acts, again and again, in a thread of its own."""

    def __init__(self, args: FaultToleranceSection, url: str, token: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.healer = Healer(args.mini_ft_resume_delay, args.mini_ft_cooldown, args.mini_ft_max_failures)
        self.interval = args.mini_ft_poll_interval
        self.clock = clock
        self._client = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=30, trust_env=False)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mini-ft-controller", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(10)
        self._client.close()

    def round(self) -> None:
        """One look and what follows from it. An API that does not answer is no cell's fault: the next round looks again."""
        try:
            answer = self._client.get("/cells")
            answer.raise_for_status()
        except httpx.HTTPError as error:
            logger.warning("the control API does not answer: %s", error)
            return
        cells = [Cell.model_validate(item) for item in answer.json()["items"]]
        for action in self.healer.decide(cells, self.clock()):
            logger.warning("%s %s", "suspending" if action.suspend else "resuming", action.cell)
            try:
                self._client.patch(f"/cells/{action.cell}", json={"spec": {"suspend": action.suspend}}).raise_for_status()
            except httpx.HTTPError as error:
                self.healer.failed(action.cell, self.clock(), str(error))
            else:
                self.healer.done(action, self.clock())

    def _run(self) -> None:
        while not self._stop.wait(self.interval):
            self.round()
