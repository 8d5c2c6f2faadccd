"""The plain rollout function: everything it sends is known before it starts, so the same seed gives the same bits."""

from __future__ import annotations

from collections.abc import Sequence

from miles.config.run_config import RunConfig
from miles.rollout.context import RolloutContext, used_up
from miles.rollout.group import renewed
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
        self.open: set[int] = set()  # drawn, and neither ended nor handed out

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
                else:
                    self.open.discard(group.group_index)
            wave += 1
        kept.sort(key=lambda group: group.group_index)
        self.open.clear()
        return RolloutOutput(kept, verdicts.settle() | {"rollout/waves": float(wave)})

    def draw(self, rollout_id: int, kept: int) -> PromptGroup:
        group = self.context.data.take()
        if group is None:
            raise used_up(self.context, rollout_id, kept)
        self.draws.setdefault(rollout_id, []).append(group.group_index)
        self.open.add(group.group_index)
        self.context.ledger.note("taken", group.group_index, prompt=group.prompt_index, epoch=group.epoch, rollout_id=rollout_id)
        return group

    def set_weight_version(self, version: int) -> None:
        """Nothing straddles a publish here."""

    def untrained(self, trained_through: int) -> Sequence[int]:
        """Every draw made for later rollouts, also those refused or dropped: that rollout will be made again, equally."""
        self.draws = {rollout_id: draws for rollout_id, draws in self.draws.items() if rollout_id > trained_through}
        return sorted(index for draws in self.draws.values() for index in draws)

    def stats(self) -> dict[str, object]:
        return {"groups_drawn": {rollout_id: len(draws) for rollout_id, draws in self.draws.items()}}

    async def dispose(self) -> None:
        """What runs belongs to the call that awaits it; the draws that no rollout will train are told to the ledger."""
        self.context.ledger.note_all("abandoned", sorted(self.open))
        self.open.clear()
