"""What a run tells: init, log, finish. Lives in the driver's process; nothing here can stop or block a run."""

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from miles.config.run_config import RunConfig
from miles.config.validate import warnings_of
from miles.tracking import logs, run_folder
from miles.tracking.bounds import Bounds, Diagnosis
from miles.tracking.console import Console
from miles.tracking.sinks import Sinks, as_number
from miles.tracking.stalls import StallWatch
from miles.tracking.timeline import Timeline

logger = logging.getLogger(__name__)

LONGEST_TEXT = 8000  # of an error
SUMMARY_EVERY = 10.0  # seconds
UNIFORM = 3  # rollouts in a row without a difference to learn from, before that is told
IN_GROUPS = ("grpo", "rloo", "maxrl", "reinforce_plus_plus_baseline")  # estimators that compare answers to one prompt


class Tracking:
    """One run's folder, sinks, console and timeline."""

    def __init__(self, args: RunConfig) -> None:
        self.args = args
        logs.setup(args.log_level)
        self.folder = run_folder.prepare(args)
        self._lock = run_folder.lock(self.folder)
        logs.setup(args.log_level, self.folder / "logs" / "driver.log")
        for warning in warnings_of(args):
            logger.warning("%s", warning)
        self.timeline = Timeline(self.folder / "timeline.json")
        self.sinks = Sinks(args, self.folder)
        self.console = Console(args, self.timeline)
        self.stalls = StallWatch(self.timeline, args.stall_timeout)
        self.stalls.start()
        self.bounds = Bounds(args)
        self._summary_due = 0.0
        self._told = -1  # the last rollout whose line has been shown
        self._to_tell: list[tuple[int, str]] = []
        self._warned = self._left_out = False
        self._uniform = 0
        self.latest: dict[str, float] = {}
        self.steps_per_rollout = args.samples_per_rollout // args.samples_per_step

    def log(self, metrics: Mapping[str, Any], rollout_id: int, step: int | None) -> None:
        if step is None:
            step = (rollout_id + 1) * self.steps_per_rollout
        values = {name: as_number(value) for name, value in metrics.items()}
        numbers = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
        self.latest = {**self.latest, **numbers, "rollout_id": rollout_id, "step": step}  # replaced, not changed: other threads read it
        self.sinks.log(values, rollout_id, step)
        self.console.update(values, rollout_id, step)
        self._warn_without_rewards(values, rollout_id)
        if (left_out := values.get("rollout/prompts_left_out")) and not self._left_out:
            self._left_out = True
            logger.warning("%d prompts of the data are left out; %s says why", left_out, self.folder / "logs" / "executor.log")

    def _warn_without_rewards(self, values: Mapping[str, Any], rollout_id: int) -> None:
        if "rollout/unscored" not in values or self.args.advantage_estimator in ("opd", "sft") or self._warned:
            return
        missing = values["rollout/unscored"]
        if "rollout/reward" in values:
            self._uniform = self._uniform + 1 if values.get("rollout/uniform_groups_share") == 1.0 else 0
            if self._uniform == UNIFORM and self.args.advantage_estimator in IN_GROUPS:
                self._warned = True
                told = "in the last %d rollouts all answers to a prompt had equal rewards (on average %g): %s learns nothing from that"
                logger.warning(told, UNIFORM, values["rollout/reward"], self.args.advantage_estimator)
            return
        self._warned = True
        told = (
            "nothing is learned from rollout %d: --reward %s could score none of its %d samples; `miles check-reward` tries it on the data"
        )
        logger.warning(told, rollout_id, self.args.reward, missing)

    def step_done(self, rollout_id: int) -> None:
        self._log_step(rollout_id)
        self._told = rollout_id
        self._tell()

    def tell_after(self, rollout_id: int, text: str) -> None:
        self._to_tell.append((rollout_id, text))
        self._tell()

    def _tell(self, everything: bool = False) -> None:
        waiting, self._to_tell = self._to_tell, []
        for rollout_id, text in waiting:
            if everything or rollout_id <= self._told:
                logger.info("%s", text)
            else:
                self._to_tell.append((rollout_id, text))

    def _log_step(self, rollout_id: int) -> None:
        metrics = self.timeline.step_metrics(rollout_id)
        if not metrics:
            return
        self.bounds.note(*self.timeline.recent(), rollout_id)
        diagnosis = self.bounds.diagnosis()
        if diagnosis is not None:
            metrics |= {"perf/model_step_seconds": diagnosis.model.seconds, "perf/model_speedup": diagnosis.speedup}
            self.console.bound = diagnosis.sentence
            if time.monotonic() > self._summary_due:
                self._summary_due = time.monotonic() + SUMMARY_EVERY
                self.write_summary(diagnosis)
        self.log(metrics, rollout_id, None)

    def write_summary(self, diagnosis: Diagnosis) -> None:
        summary = {"bound": diagnosis.sentence, "speedup": diagnosis.speedup, "step": asdict(diagnosis.model)}
        (self.folder / run_folder.SUMMARY).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")

    def finish(self, error: BaseException | None) -> None:
        if (diagnosis := self.bounds.diagnosis()) is not None:
            self.write_summary(diagnosis)
        self.stalls.stop()
        self.console.finish()
        self._tell(everything=True)
        self.sinks.finish()
        self.timeline.close()
        (self.folder / run_folder.END).write_text(json.dumps(_end_of(error)) + "\n", encoding="utf-8")
        os.close(self._lock)


def _end_of(error: BaseException | None) -> dict[str, Any]:
    """How a run ended, for end.json."""
    if error is None:
        return {"time": time.time(), "error": None, "text": ""}
    notes = "".join(getattr(error, "__notes__", ()))
    return {"time": time.time(), "error": type(error).__name__, "text": f"{error}{notes}"[-LONGEST_TEXT:]}


_current: Tracking | None = None
_unsaved = Timeline()


def init(args: RunConfig) -> None:
    """Make the run folder, set up logging, start the sinks and the console. Called once per run, before any worker starts."""
    global _current
    finish()
    _current = Tracking(args)


def log(metrics: Mapping[str, Any], rollout_id: int, step: int | None = None) -> None:
    """Write one line to metrics.jsonl and hand it to the trackers; without `init`, do nothing.

    Args:
        metrics: name -> number. Scalar tensors become numbers; None is null, and NaN and infinities are the strings "NaN", "Infinity",
            "-Infinity" in metrics.jsonl, as JSON has no such numbers.
        rollout_id: the rollout that they belong to, also when they come late, as an evaluation's do.
        step: optimizer steps done when they were true; default: those that the whole rollout makes.
    """
    if _current is not None:
        _current.log(metrics, rollout_id, step)


def step_done(rollout_id: int) -> None:
    """Log the perf/* of a rollout whose training, and publish where one was due, are done; and what bounds the run."""
    if _current is not None:
        _current.step_done(rollout_id)


def tell_after(rollout_id: int, text: str) -> None:
    """Log a line about a rollout, once the rollout's own line has been shown; at the latest when the run ends."""
    if _current is not None:
        _current.tell_after(rollout_id, text)
    else:
        logger.info("%s", text)


def timeline() -> Timeline:
    """This run's timeline; one that is not written when there is no run."""
    return _unsaved if _current is None else _current.timeline


def set_who_waits(source: Callable[[], str]) -> None:
    """Say how one learns who waits for whom, for the report of a run that stalls. Called before the workers start."""
    if _current is not None:
        _current.stalls.who_waits = source


def latest() -> Mapping[str, float]:
    """The last value of every metric."""
    return {} if _current is None else _current.latest


def folder() -> Path | None:
    """This run's folder, once there is one."""
    return None if _current is None else _current.folder


def finish() -> None:
    """Close everything, and note how the run ended: with the exception that is on its way, if any. Idempotent; never raises."""
    global _current
    ending, _current = _current, None
    if ending is not None:
        try:
            ending.finish(sys.exc_info()[1])
        except OSError as error:
            os.write(2, f"tracking could not be closed: {error}\n".encode())
