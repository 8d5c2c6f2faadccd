"""The plain rollout function: everything it sends is known before it starts, so the same seed gives the same bits."""

from __future__ import annotations

from collections.abc import Sequence

from miles.config.run_config import RunConfig
from miles.fault_tolerance.kill_points import reached
from miles.rollout.context import RolloutContext, used_up
from miles.rollout.group import renewed
from miles.rollout.state import FunctionState
from miles.rollout.waves import run_wave
from miles.types import PromptGroup, RolloutOutput


class BatchRollout:
    """Consumes draws of the data source, produces one batch per call, waits for its slowest sample.

    The first wave holds rollout_batch_size groups; groups that the filter refuses are replaced by new draws and failed ones
    started again, both in a further wave, until the batch is full. Groups come out in draw order.
    """

    def __init__(self, args: RunConfig, context: RolloutContext):
        self.args = args
        self.context = context
        self.draws: dict[int, list[int]] = {}  # rollout id -> every group index drawn for it

    async def __call__(self, rollout_id: int) -> RolloutOutput:
        size, verdicts = self.args.rollout_batch_size, self.context.verdicts
        kept: list[PromptGroup] = []
        again: list[PromptGroup] = []
        wave = 0
        while len(kept) < size:
            groups = again + [self.draw(rollout_id, len(kept)) for _ in range(size - len(kept) - len(again))]
            groups.sort(key=lambda group: group.group_index)
            failures = await run_wave(self.context, f"r{rollout_id}.{wave}", groups)
            again = []
            for group, failure in zip(groups, failures, strict=True):
                if failure is None:
                    self.context.data.note_scored(group)
                if failure is None and verdicts.passes(group):
                    kept.append(group)
                elif failure is not None and verdicts.retries(group, failure):
                    again.append(renewed(group))
            wave += 1
        kept.sort(key=lambda group: group.group_index)
        return RolloutOutput(kept, verdicts.settle() | {"rollout/waves": float(wave)})

    def draw(self, rollout_id: int, kept: int) -> PromptGroup:
        group = self.context.data.take()
        if group is None:
            raise used_up(self.context, rollout_id, kept)
        self.draws.setdefault(rollout_id, []).append(group.group_index)
        self.context.ledger.note("taken", group.group_index, prompt=group.prompt_index, epoch=group.epoch, rollout_id=rollout_id)
        reached(self.args, "taken", rollout_id)
        return group

    def set_weight_version(self, version: int) -> None:
        """Nothing straddles a publish here."""

    def untrained(self, trained_through: int) -> Sequence[int]:
        """Every draw made for later rollouts, also those refused or dropped: that rollout will be made again, equally."""
        self.draws = {rollout_id: draws for rollout_id, draws in self.draws.items() if rollout_id > trained_through}
        return sorted(index for draws in self.draws.values() for index in draws)

    waits = True  # a draw is determined by its number, and the batch ahead by the weights of its time, which are gone at a resume

    def idle(self) -> bool:
        """Whatever is in flight belongs to a call."""
        return True

    async def quiet(self) -> None:
        """The driver waits for the call before it publishes."""

    def state(self) -> FunctionState:
        draws = {str(rollout_id): draws for rollout_id, draws in self.draws.items()}
        return FunctionState({"draws": draws, "verdicts": self.context.verdicts.state()})

    def load_state(self, state: FunctionState) -> None:
        self.draws = {int(rollout_id): draws for rollout_id, draws in state.values["draws"].items()}
        self.context.verdicts.load_state(state.values["verdicts"])

    def stats(self) -> dict[str, object]:
        return {"groups_drawn": {rollout_id: len(draws) for rollout_id, draws in self.draws.items()}}

    async def dispose(self) -> None:
        """What runs belongs to the call that awaits it."""
