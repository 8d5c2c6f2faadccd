"""Fully asynchronous and deterministic: whole rollouts are made ahead on a fixed schedule, so that nothing depends on timing.

Rollout r is drained under weight version v(r) = floor(r / update_weights_interval) + 1. It is started, as one wave after the other, once
version max(1, v(r) - max_weight_staleness) is out, after the rollouts before it; and a publish waits for what is in flight. So the
version of every token of a rollout is a function of the rollout's number and of the staleness allowed, and no answer mixes two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from miles.config.run_config import RunConfig
from miles.rollout.batch_rollout import BatchRollout
from miles.rollout.context import RolloutContext
from miles.rollout.group import cut_off
from miles.rollout.state import FunctionState
from miles.types import RolloutOutput


class ScheduledRollout:
    """Consumes draws, keeps at most one rollout in flight, holds finished ones until they are asked for."""

    waits = True

    def __init__(self, args: RunConfig, context: RolloutContext):
        self.args, self.context = args, context
        self.make = BatchRollout(args, context)
        self.next: int | None = None  # the next rollout to start; from the first call or the checkpoint on
        self.finished: dict[int, RolloutOutput] = {}
        self.flight: asyncio.Task[RolloutOutput] | None = None
        self.failure: BaseException | None = None
        self.event = asyncio.Event()
        self.closed = False

    def start_version(self, rollout_id: int) -> int:
        """The weight version under which a rollout is generated."""
        return max(1, rollout_id // self.args.update_weights_interval + 1 - self.args.max_weight_staleness)

    async def __call__(self, rollout_id: int) -> RolloutOutput:
        if self.next is None:
            self.next = rollout_id
        self._start()
        while rollout_id not in self.finished:
            await self._changed()
        return self.finished.pop(rollout_id)

    def set_weight_version(self, version: int) -> None:
        self._start()

    async def quiet(self) -> None:
        while not self.idle():
            await self._changed()

    async def _changed(self) -> None:
        if self.failure is not None:
            raise self.failure
        self.event.clear()
        await self.event.wait()

    def idle(self) -> bool:
        return self.flight is None

    def _start(self) -> None:
        """Start the next rollout, if it is due and none is in flight."""
        due = self.next is not None and self.next < self.context.num_rollout
        if due and self.flight is None and not self.closed and self.start_version(self.next or 0) <= self.context.weight_version:
            self.flight = asyncio.ensure_future(self.make(self.next or 0))
            self.flight.add_done_callback(self._landed)

    def _landed(self, flight: asyncio.Task[RolloutOutput]) -> None:
        self.flight = None
        if not flight.cancelled():
            self.failure = flight.exception()
            if self.failure is None:
                assert self.next is not None
                self.finished[self.next] = flight.result()
                self.next += 1
                self._start()
        if self.idle():
            self.context.at_rest()
        self.event.set()

    def untrained(self, trained_through: int) -> Sequence[int]:
        return self.make.untrained(trained_through)

    def state(self) -> FunctionState:
        outputs = sorted(self.finished.items())
        told = [{"rollout_id": rollout_id, "groups": len(output.groups), "metrics": output.metrics} for rollout_id, output in outputs]
        groups = [group for _, output in outputs for group in output.groups]
        return FunctionState({"next": self.next, "finished": told, "make": self.make.state().values}, groups)

    def load_state(self, state: FunctionState) -> None:
        groups = iter(state.groups)
        self.next = state.values["next"]
        self.make.load_state(FunctionState(state.values["make"]))
        for told in state.values["finished"]:
            self.finished[told["rollout_id"]] = RolloutOutput([next(groups) for _ in range(told["groups"])], told["metrics"])

    def stats(self) -> dict[str, object]:
        return {"next_rollout": self.next, "rollouts_finished": sorted(self.finished), "in_flight": not self.idle()} | self.make.stats()

    async def dispose(self) -> None:
        self.closed = True
        if self.flight is not None:
            await cut_off([self.flight])
