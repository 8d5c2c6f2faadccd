"""What bounds a run, and what would change it: a model of its step, fitted to its last steps.

With G, R, D, Q the seconds in which a batch is generated, scored, packed, and held up, t the seconds of training on it, w those of
saving, s of publishing and e of evaluating, each for one step:

    taking turns         G + R + D + Q + t + w + s + e
    plain asynchronous   max(G + R + D + Q, t + w) + s + e        the batch is whole before the publish
    fully asynchronous   max(G + R, t + w + D) + s + e            G and R per batch, at the rate at which groups come

and G goes with 1 / engines, t with 1 / trainers. In plain mode G, R, D and Q are measured along the group that was scored last.
In fully asynchronous mode N groups side by side that take L seconds each come at N / L a second (Little's law), so a batch of B
takes B L / N; L is split into its generated and its scored part.
"""

from __future__ import annotations

import os
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from miles.config.run_config import RunConfig
from miles.tracking.critical_path import Arrival, Span, rollout_parts
from miles.tracking.intervals import total, union
from miles.types import GroupTimes

Mode = Literal["in turn", "plain", "fully"]
KEPT_STEPS = 32
LEAST_STEPS = 3
WORTH_SAYING = 1.05  # times faster
FEW_STEPS, SHORT_STEP = 8, 0.05  # below these, the second in seconds, one odd step or the clock of the machine may decide
SMALLER = {"engine": "shorter answers (--max-response-length)", "trainer": "fewer samples a rollout (--rollout-batch-size)"}
"""What eases a worker's load on a host that has no room for another."""


@dataclass(frozen=True, slots=True)
class StepModel:
    """Seconds of each part of one step; `seconds` puts them together."""

    mode: Mode
    generation: float = 0.0
    reward: float = 0.0
    data: float = 0.0
    queue: float = 0.0
    training: float = 0.0
    save: float = 0.0
    publish: float = 0.0
    eval: float = 0.0

    @property
    def rollout(self) -> float:
        """What must be done for a batch before it can be trained, beside the training of the one before."""
        return self.generation + self.reward + (0.0 if self.mode == "fully" else self.data + self.queue)

    @property
    def trainer(self) -> float:
        return self.training + self.save + (self.data if self.mode == "fully" else 0.0)

    @property
    def seconds(self) -> float:
        rest = self.publish + self.eval
        return rest + (self.rollout + self.trainer if self.mode == "in turn" else max(self.rollout, self.trainer))

    @property
    def bound(self) -> str:
        """The part that one had better change first."""
        chain = (
            ("generation", "reward", "data", "queue") if self.mode == "in turn" or self.rollout >= self.trainer else ("training", "save")
        )
        chain = (*chain, "training", "save") if self.mode == "in turn" else chain
        return max((*chain, "publish", "eval"), key=lambda part: float(getattr(self, part)))


PARTS = tuple(field.name for field in fields(StepModel) if field.name != "mode")
RARE = ("save", "publish", "eval")  # in some steps only, so their mean counts and not their median


def fit(mode: Mode, steps: Sequence[Mapping[str, float]]) -> StepModel:
    """The model of these steps' parts: medians, which one odd step does not move."""
    parts = {
        part: (statistics.fmean if part in RARE else statistics.median)([step.get(part, 0.0) for step in steps]) if steps else 0.0
        for part in PARTS
    }
    return StepModel(mode, **parts)


def measure(
    mode: Mode, spans: Sequence[Span], arrivals: Mapping[int, Arrival], rollout_id: int, batch_size: int
) -> dict[str, float] | None:
    """The parts of one rollout's step, from its own training's beginning back to that of the training before; None: not known.

    Args:
        batch_size: groups of a rollout.
    """
    trained = [span for span in spans if span.name == "train" and span.rollout_id == rollout_id]
    before = [span.start for span in spans if span.name == "train" and span.rollout_id == rollout_id - 1]
    get = next((span for span in spans if span.name == "generate" and span.rollout_id == rollout_id), None)
    if not trained or not before or get is None or rollout_id not in arrivals:
        return None
    low, high = min(before), min(span.start for span in trained)
    step = {"training": total(union((span.start, span.end) for span in trained))}
    for part in RARE:
        step[part] = total(union(((s.start, s.end) for s in spans if s.name == part and not s.background), low, high))
    if mode != "fully":
        along = rollout_parts(get, arrivals)
        return step | {part: along[part] for part in ("generation", "reward", "data", "queue")}
    publishes = union((span.start, span.end) for span in spans if span.name == "publish")
    groups = [group for batch in arrivals.values() for group in batch.groups]
    rate = batch_size / max(_side_by_side(groups), 1)
    own = arrivals[rollout_id].groups
    writing = [group.generated - group.started - total(union(publishes, group.started, group.generated)) for group in own]
    scoring = [group.scored - group.generated for group in own]
    step["data"] = get.end - max(arrivals[rollout_id].ready, get.start)
    return step | {"generation": rate * statistics.fmean(writing or [0.0]), "reward": rate * statistics.fmean(scoring or [0.0])}


def _side_by_side(groups: Sequence[GroupTimes]) -> int:
    """Groups in flight while as many are as the run allows: the upper quartile of what each saw when it began."""
    moments = sorted([(group.started, 1) for group in groups] + [(group.scored, -1) for group in groups])
    flying, seen = 0, []
    for _, change in moments:
        flying += change
        if change > 0:
            seen.append(flying)
    return sorted(seen)[len(seen) * 3 // 4] if seen else 0


@dataclass(frozen=True, slots=True)
class Change:
    """Something to change, and the model of the step with it."""

    what: str
    model: StepModel


def one_more(worker: str, args: RunConfig, cores: int, threads: int | None) -> str:
    """One more worker, with what it needs: it gives nothing on devices that the run has taken already.

    Args:
        cores: those of the host.
        threads: of the worker.
    """
    if args.device == "cuda":
        return f"one more {worker} on a GPU of its own"
    if args.ray_address:
        return f"one more {worker}"  # a cluster may have more
    taken = args.num_engines * (args.engine_threads or 1) + args.num_trainers * (args.trainer_threads or 1)
    if cores - taken >= (threads or 1):
        return f"one more {worker}"
    return f"{SMALLER[worker]}, or one more {worker} on a host with more than the {cores} cores of this one,"


def changes(model: StepModel, args: RunConfig, cores: int) -> list[Change]:
    """What could be changed about what bounds the run, the most direct first."""
    engine = one_more("engine", args, cores, args.engine_threads)
    trainer = one_more("trainer", args, cores, args.trainer_threads)
    found = {
        "generation": [Change(engine, replace(model, generation=model.generation * args.num_engines / (args.num_engines + 1)))],
        "reward": [Change("a reward twice as fast", replace(model, reward=model.reward / 2))],
        "training": [Change(trainer, replace(model, training=model.training * args.num_trainers / (args.num_trainers + 1)))],
        "publish": [Change(f"--update-weights-interval {2 * args.update_weights_interval}", replace(model, publish=model.publish / 2))],
        "eval": [Change(f"--eval-interval {2 * (args.eval_interval or 1)}", replace(model, eval=model.eval / 2))],
        "save": [Change(f"--save-interval {2 * (args.save_interval or 1)}", replace(model, save=model.save / 2))],
        "data": [],
        "queue": [],
    }[model.bound]
    if model.mode == "in turn":
        found.append(Change("train_async.py", replace(model, mode="plain")))
    elif model.mode == "plain" and model.bound == "reward":
        found.append(Change("--fully-async", replace(model, mode="fully", reward=0.0)))
    return found


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What bounds a run. `speedup` is what the best change would give, 1.0 where there is none."""

    model: StepModel
    sentence: str
    speedup: float


def diagnose(model: StepModel, args: RunConfig, cores: int) -> Diagnosis:
    """Example sentence: bound by generation: 2.3x training; one more engine would give up to 1.8x. `cores`: of the host."""
    bound = model.bound
    own = float(getattr(model, bound))
    other = {"training": (model.rollout, "generation and reward")}.get(bound, (model.training, "training"))
    if bound in ("generation", "reward", "data", "queue", "training") and own >= other[0]:
        against = f"{own / other[0]:.1f}x {other[1]}" if other[0] else f"{own:.2g} s a step"
    else:
        against = f"{own / model.seconds:.0%} of a step"
    best = max(changes(model, args, cores), key=lambda change: model.seconds / max(change.model.seconds, 1e-9), default=None)
    speedup = model.seconds / max(best.model.seconds, 1e-9) if best is not None else 1.0
    advice = (
        f"{best.what} would give up to {speedup:.1f}x" if best is not None and speedup >= WORTH_SAYING else "no single change gives much"
    )
    return Diagnosis(model, f"bound by {bound}: {against}; {advice}", max(speedup, 1.0))


class Bounds:
    """Collects the steps of a run as they end."""

    def __init__(self, args: RunConfig, cores: int | None = None) -> None:
        self.args = args
        self.cores = cores or os.cpu_count() or 1
        self._steps: deque[dict[str, float]] = deque(maxlen=KEPT_STEPS)
        self._in_turn = True  # until a batch was asked for before the training before it had ended

    @property
    def mode(self) -> Mode:
        return "fully" if self.args.fully_async else "in turn" if self._in_turn else "plain"

    def note(self, spans: Sequence[Span], arrivals: Mapping[int, Arrival], rollout_id: int) -> None:
        """The training of `rollout_id` has ended."""
        get = next((span for span in spans if span.name == "generate" and span.rollout_id == rollout_id), None)
        before = [span.end for span in spans if span.name == "train" and span.rollout_id == rollout_id - 1]
        if get is not None and before and get.start < max(before):
            self._in_turn = False
        step = measure(self.mode, spans, arrivals, rollout_id, self.args.rollout_batch_size)
        if step is not None:
            self._steps.append(step)

    def diagnosis(self) -> Diagnosis | None:
        """None while there are too few steps to say anything."""
        if len(self._steps) < LEAST_STEPS:
            return None
        found = diagnose(fit(self.mode, self._steps), self.args, self.cores)
        if len(self._steps) >= FEW_STEPS and found.model.seconds >= SHORT_STEP:
            return found
        return replace(found, sentence=f"{found.sentence} (a guess: {len(self._steps)} steps of {found.model.seconds:.2g} s)")
