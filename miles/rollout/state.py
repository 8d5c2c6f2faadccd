"""The rollout side's part of a checkpoint: executor.json, and the tokens of finished groups in executor.npz."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from miles.rollout.held import DrawAgain, columns_of, entry_of, groups_of
from miles.types import PromptGroup, RolloutOutput

STATE_FILE = "executor.json"
COLUMNS_FILE = "executor.npz"


@dataclass(slots=True)
class Drained:
    """A rollout that was handed out, and that no trainer is known to have used."""

    rollout_id: int
    weight_version: int  # the engines' when it was drained
    output: RolloutOutput


@dataclass(slots=True)
class FunctionState:
    """What a rollout function has beyond the last trained rollout."""

    values: dict[str, Any] = field(default_factory=dict)  # JSON values
    groups: list[PromptGroup] = field(default_factory=list)  # finished, not drained
    in_flight: list[int] = field(default_factory=list)  # group indices that will be started again


@dataclass(slots=True)
class Ahead:
    """All that was generated beyond the last trained rollout, as it is handed to the resumed run."""

    data: dict[str, Any]  # the data source's state, in which these groups are taken
    function: FunctionState
    drained: list[Drained]


def document(state: dict[str, Any], ahead: Ahead | None) -> tuple[dict[str, Any], list[PromptGroup]]:
    """The state as JSON values, and the groups whose columns go with it, in this order."""
    if ahead is None:
        return state | {"ahead": None}, []
    drained = [
        {
            "rollout_id": entry.rollout_id,
            "weight_version": entry.weight_version,
            "metrics": entry.output.metrics,
            "groups": [entry_of(group) for group in entry.output.groups],
        }
        for entry in ahead.drained
    ]
    function = {"values": ahead.function.values, "groups": [entry_of(group) for group in ahead.function.groups]}
    groups = [group for entry in ahead.drained for group in entry.output.groups] + ahead.function.groups
    return state | {"ahead": {"data": ahead.data, "function": function, "drained": drained}}, groups


def write(folder: Path, state: dict[str, Any], groups: Sequence[PromptGroup], between: Callable[[], None] = lambda: None) -> None:
    """Write both files, the JSON last and all of it or nothing; `between` is called between the two."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / COLUMNS_FILE).open("wb") as columns:
        np.savez(columns, **columns_of(groups))  # type: ignore[arg-type]  # its stub takes the arrays for a flag
        columns.flush()
        os.fsync(columns.fileno())
    between()
    temporary = folder / f".{STATE_FILE}.new"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(state, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / STATE_FILE)


def read(folder: Path, rollout_id: int) -> dict[str, Any]:
    """The state of rollout `rollout_id`.

    Raises:
        ValueError: no such file, or of another rollout.
    """
    path = folder / STATE_FILE
    try:
        state: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"--load: no usable {path}: {error}") from error
    if state["rollout_id"] != rollout_id:
        raise ValueError(f"--load: {path} is of rollout {state['rollout_id']}, the trainers restored {rollout_id}")
    return state


def read_groups(folder: Path, state: dict[str, Any], draw: DrawAgain) -> tuple[list[Drained], list[PromptGroup]]:
    """The groups of `state["ahead"]`: drained rollouts, and what the function had finished. `draw` as in `groups_of`."""
    ahead = state["ahead"]
    entries = [entry for rollout in ahead["drained"] for entry in rollout["groups"]] + ahead["function"]["groups"]
    with np.load(folder / COLUMNS_FILE) as columns:
        groups = iter(groups_of(entries, dict(columns), draw))
    drained = [
        Drained(
            rollout["rollout_id"],
            rollout["weight_version"],
            RolloutOutput([next(groups) for _ in rollout["groups"]], rollout["metrics"]),
        )
        for rollout in ahead["drained"]
    ]
    return drained, list(groups)
