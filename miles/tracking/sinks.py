"""Where metrics go: metrics.jsonl always, and the trackers that were asked for.

A tracker is used in a thread of its own, from its construction on, so that one that is off-line or slow delays nothing. One that
raises is switched off with one warning. After a resume, rollouts that a remote tracker has already seen are not sent to it again
(metrics.jsonl and TensorBoard show the redone ones instead), so its curves never fold back.
"""

import json
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from miles.config.run_config import RunConfig
from miles.protocols import TrackingSink
from miles.tracking.run_folder import Trackers

logger = logging.getLogger(__name__)

FINISH_SECONDS = 15.0
QUEUE_LINES = 10_000


def as_number(value: Any) -> Any:
    """A metric as a float, an int, or None; a tensor or array of one value becomes that; anything else its text."""
    if value is None or isinstance(value, int | float):
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)


def json_value(value: Any) -> Any:
    """As `as_number`, for JSON, which has no NaN: "NaN", "Infinity", "-Infinity"."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


class JsonLines:
    """metrics.jsonl: each line is one write, there at once for whoever follows the file. A full disk costs lines, not the run."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o644)
        self._failed = False

    def log(self, metrics: dict[str, float], rollout_id: int, step: int) -> None:
        line = {"rollout_id": rollout_id, "step": step, "time": round(time.time(), 3)}
        line |= {name: json_value(value) for name, value in metrics.items()}
        try:
            os.write(self._file, (json.dumps(line) + "\n").encode())
        except OSError as error:
            if not self._failed:
                logger.error("metrics.jsonl misses lines from rollout %d on: %s", rollout_id, error)
            self._failed = True

    def finish(self) -> None:
        os.close(self._file)


class TensorBoard:
    """Event files in tensorboard/ of the run folder, without torch."""

    def __init__(self, args: RunConfig, folder: Path, trackers: Trackers) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder / "tensorboard"))
        if trackers.resumed_at is not None:  # tells TensorBoard to forget what is done again
            step = trackers.resumed_at * (args.samples_per_rollout // args.samples_per_step) + 1
            self._writer.add_event(Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START)))

    def log(self, metrics: dict[str, float], rollout_id: int, step: int) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases, with the optimizer step as axis, so that a late evaluation lands where it belongs."""

    def __init__(self, args: RunConfig, folder: Path, trackers: Trackers) -> None:
        import wandb

        config = args.model_dump(exclude={"api_server_token"})
        self._run = wandb.init(
            project=args.tracking_project, name=args.name, id=trackers.run_id, resume="allow", dir=str(folder), config=config
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, metrics: dict[str, float], rollout_id: int, step: int) -> None:
        self._run.log({**metrics, "rollout_id": rollout_id, "step": step})

    def finish(self) -> None:
        self._run.finish()


class MLflow:
    """MLflow, wherever MLFLOW_TRACKING_URI points. It takes no NaN; metrics.jsonl has those."""

    def __init__(self, args: RunConfig, folder: Path, trackers: Trackers) -> None:
        import mlflow

        self._mlflow = mlflow
        mlflow.set_experiment(args.tracking_project)
        run = mlflow.start_run(run_id=trackers.mlflow_run_id, run_name=args.name)
        if trackers.mlflow_run_id is None:
            trackers.mlflow_run_id = run.info.run_id
            trackers.save()
            mlflow.log_params({name: str(value)[:500] for name, value in args.model_dump(exclude={"api_server_token"}).items()})

    def log(self, metrics: dict[str, float], rollout_id: int, step: int) -> None:
        self._mlflow.log_metrics({name: value for name, value in metrics.items() if math.isfinite(value)}, step=step)

    def finish(self) -> None:
        self._mlflow.end_run()


class Trackio:
    """trackio, the local-first tracker."""

    def __init__(self, args: RunConfig, folder: Path, trackers: Trackers) -> None:
        import trackio

        self._trackio = trackio
        config = args.model_dump(exclude={"api_server_token"})
        trackio.init(project=args.tracking_project, name=f"{args.name}-{trackers.run_id}", resume="allow", config=config)

    def log(self, metrics: dict[str, float], rollout_id: int, step: int) -> None:
        self._trackio.log({**metrics, "rollout_id": rollout_id}, step=step)

    def finish(self) -> None:
        self._trackio.finish()


MAKERS: dict[str, Callable[[RunConfig, Path, Trackers], TrackingSink]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": MLflow,
    "trackio": Trackio,
}


class Background:
    """A tracker in its own thread. `log` never waits and never raises."""

    def __init__(self, name: str, make: Callable[[], TrackingSink]) -> None:
        self.name = name
        self.alive = True
        self._switch = threading.Lock()
        self._lines: queue.Queue[tuple[dict[str, float], int, int] | None] = queue.Queue(QUEUE_LINES)
        self._thread = threading.Thread(target=self._work, args=(make,), name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, metrics: dict[str, float], rollout_id: int, step: int) -> None:
        if not self.alive:
            return
        try:
            self._lines.put_nowait((metrics, rollout_id, step))
        except queue.Full:
            self._switch_off(f"it is {QUEUE_LINES} lines behind")

    def finish(self) -> None:
        """Waits for what is queued, but not for ever."""
        if not self.alive:
            return
        deadline = time.monotonic() + FINISH_SECONDS
        with suppress(queue.Full):
            self._lines.put(None, timeout=FINISH_SECONDS)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._switch_off(f"it did not finish within {FINISH_SECONDS:g} s")

    def _work(self, make: Callable[[], TrackingSink]) -> None:
        try:
            sink = make()
            while self.alive and (line := self._lines.get()) is not None:
                sink.log(*line)
            sink.finish()
        except Exception as error:  # a tracker's failure, whatever it is, must not reach the run
            hint = f'; pip install "miles[{self.name}]"' if isinstance(error, ModuleNotFoundError) else ""
            self._switch_off(f"{type(error).__name__}: {error}{hint}")

    def _switch_off(self, reason: str) -> None:
        with self._switch:
            if self.alive:  # said before it counts: finish returns at once for a tracker that is off
                logger.warning("tracker %s is switched off, metrics.jsonl goes on: %s", self.name, reason)
                self.alive = False


class Sinks:
    """metrics.jsonl and the trackers of one run."""

    def __init__(self, args: RunConfig, folder: Path) -> None:
        self.local = JsonLines(folder / "metrics.jsonl")
        self.trackers = Trackers.load(folder)
        self.background = {
            name: Background(name, partial(MAKERS[name], args, folder, self.trackers)) for name in dict.fromkeys(args.trackers)
        }

    def log(self, metrics: dict[str, Any], rollout_id: int, step: int) -> None:
        self.local.log(metrics, rollout_id, step)
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        for name, sink in self.background.items():
            if name == "tensorboard" or rollout_id > self.trackers.sent_through:
                sink.log(numbers, rollout_id, step)

    def finish(self) -> None:
        for sink in self.background.values():
            sink.finish()
        self.local.finish()
