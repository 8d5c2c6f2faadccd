"""When the rollout side's part of a checkpoint may be taken, and what a resumed run hands out again."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from miles.protocols import RolloutFn
from miles.rollout import state as files
from miles.rollout.context import RolloutContext
from miles.rollout.cursor import merged
from miles.rollout.made_with import changes
from miles.rollout.state import Ahead, Drained, FunctionState
from miles.types import PromptGroup

logger = logging.getLogger(__name__)


@runtime_checkable
class KeepsState(Protocol):
    """A rollout function that can say what it has, and go on from it. One that cannot starts again what no trainer has used."""

    waits: bool
    """Whether a save waits for what is in flight, because the resumed run must go on to the same bits."""

    def idle(self) -> bool:
        """Whether nothing is in flight. One that waits calls `context.at_rest` whenever that becomes true outside of a call."""
        ...

    async def quiet(self) -> None:
        """Called before a publish: returns when no answer that must not mix two versions is in flight."""
        ...

    def state(self) -> FunctionState:
        """Called at a save, when idle where it waits."""
        ...

    def load_state(self, state: FunctionState) -> None:
        """Called once at a resume, before the first call."""
        ...


@dataclass(slots=True, eq=False)
class _Pending:
    """A save that waits for what is ahead of its rollout."""

    rollout_id: int
    ahead: int | None  # drained before the save may be taken
    data: dict[str, Any]  # the state that needs nothing of it
    drained: dict[int, Drained]  # by then and later
    taken: asyncio.Future[tuple[dict[str, Any], list[PromptGroup]]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Saves:
    """Rollouts asked for, drained and not trained; saves under way; and what a checkpoint brought along.

    Args:
        made_with: what generated groups depend on, as JSON values. A checkpoint's groups are used only where it is the same.
    """

    def __init__(self, context: RolloutContext, made_with: dict[str, Any]):
        self.context = context
        self.made_with = made_with
        self.function: RolloutFn | None = None
        self.asked: set[int] = set()  # and not drained
        self.drained: dict[int, Drained] = {}  # and not trained
        self.ready: dict[int, Drained] = {}  # of the checkpoint, until they are asked for
        self.pending: list[_Pending] = []
        context.at_rest = self.at_rest

    async def take(self, rollout_id: int, ahead: int | None) -> tuple[dict[str, Any], list[PromptGroup]]:
        """The state as of rollout `rollout_id`, and the finished groups that go with it.

        Args:
            ahead: a later rollout that was asked for. Where the function waits, so does this, until it is drained.
        """
        function = self.function
        assert function is not None, "init(engines) comes before save"
        data = self._state(rollout_id, function)
        if not isinstance(function, KeepsState):
            return files.document(data, None)
        later = {id: entry for id, entry in {**self.ready, **self.drained}.items() if id > rollout_id}
        pending = _Pending(rollout_id, ahead if function.waits else None, data, later)
        self.pending.append(pending)
        self.at_rest()
        try:
            return await pending.taken
        finally:
            self.pending.remove(pending)

    def take_now(self, rollout_id: int) -> tuple[dict[str, Any], list[PromptGroup]]:
        """As `take`, without anything that was generated beyond `rollout_id`."""
        assert self.function is not None, "init(engines) comes before save"
        return files.document(self._state(rollout_id, self.function), None)

    def at_rest(self) -> None:
        """Called whenever something ended: the saves that waited for it are taken, at this very moment."""
        function = self.function
        for pending in self.pending:
            if pending.taken.done() or not isinstance(function, KeepsState):
                continue
            if function.waits and (self.asked or not function.idle() or not (pending.ahead is None or pending.ahead in pending.drained)):
                continue
            own = function.state()
            data = self._state(pending.rollout_id, function)
            ahead = Ahead(merged(self.context.data.state(), own.in_flight), own, [pending.drained[id] for id in sorted(pending.drained)])
            pending.taken.set_result(files.document(pending.data | {"ledger_number": data["ledger_number"]}, ahead))

    def note_drained(self, entry: Drained) -> None:
        self.asked.discard(entry.rollout_id)
        self.drained[entry.rollout_id] = entry
        for pending in self.pending:
            if entry.rollout_id > pending.rollout_id:
                pending.drained[entry.rollout_id] = entry
        self.at_rest()

    def note_trained(self, rollout_id: int) -> None:
        self.drained.pop(rollout_id, None)

    def fail(self, error: BaseException) -> None:
        """What was waited for will not come."""
        reason = error if isinstance(error, Exception) else RuntimeError("the rollout that a save waited for was cut off")
        for pending in self.pending:
            if not pending.taken.done():
                pending.taken.set_exception(reason)

    def _state(self, rollout_id: int, function: RolloutFn) -> dict[str, Any]:
        return {
            "rollout_id": rollout_id,
            "num_rollout": self.context.num_rollout,
            "weight_version": self.context.weight_version,
            "ledger_number": self.context.ledger.next_number,
            "ledger_trained": self.context.ledger.books.ended["trained"],
            "made_with": self.made_with,
            "data": merged(self.context.data.state(), function.untrained(rollout_id)),
        }

    def load(self, rollout_id: int, folder: Path, draw: files.DrawAgain) -> None:
        """Go on after rollout `rollout_id`. ValueError: no usable state of that rollout in `folder`."""
        context, function = self.context, self.function
        state = files.read(folder, rollout_id)
        context.ledger.rewind(int(state["ledger_number"]), rollout_id, int(state["ledger_trained"]))
        if context.args.goes_on and state["ledger_trained"] and not context.ledger.books.taken:
            told = "%s is lost: its books begin anew, without the %d groups that were trained"
            logger.warning(told, context.ledger.path, state["ledger_trained"])
        ahead = state["ahead"]
        if ahead is not None and (differ := changes(state["made_with"], self.made_with)):
            told = "what was generated beyond rollout %d is generated again, as it is not what these settings give: %s"
            logger.warning(told, rollout_id, ", ".join(differ))
            ahead = None
        if ahead is None or not isinstance(function, KeepsState):
            context.data.load_state(state["data"])
            held: list[PromptGroup] = []
        else:
            context.data.load_state(ahead["data"])
            drained, finished = files.read_groups(folder, state, draw)
            self.ready = {entry.rollout_id: entry for entry in drained}
            function.load_state(FunctionState(ahead["function"]["values"], finished))
            held = [group for entry in drained for group in entry.output.groups] + finished
        self._settle_books(held)

    def _settle_books(self, held: list[PromptGroup]) -> None:
        """Groups that are started again are given back; a new ledger hears of those that are not."""
        ledger, open_groups = self.context.ledger, self.context.ledger.books.stage
        indices = {group.group_index for group in held}
        ledger.note_all("returned", sorted(set(open_groups) - indices), reason="resumed")
        for group in held:
            if group.group_index not in open_groups:
                ledger.note("taken", group.group_index, prompt=group.prompt_index, epoch=group.epoch, attempt=group.attempt)
                ledger.note("finished", group.group_index, attempt=group.attempt, version=group.oldest_version)
