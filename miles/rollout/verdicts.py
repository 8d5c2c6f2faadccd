"""What becomes of a group that was run: kept, refused by the filter, or given up after its retries; counted and told."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from miles.config.run_config import RunConfig
from miles.protocols import GroupFilter
from miles.tracking.ledger import Ledger
from miles.types import PromptGroup

logger = logging.getLogger(__name__)


TIMING = ("timeout", "engine")
"""Kinds of failures that depend on the machine and not on the run."""


class GroupFailed(Exception):
    """A group's attempt came to nothing. `again` says whether another attempt may help; `kind` is what is counted.

    `done` are the places of samples that are generated and scored all the same.
    """

    def __init__(self, group_index: int, kind: str, reason: str, again: bool, done: Sequence[int] = ()):
        super().__init__(f"group {group_index}: {reason}")
        self.kind = kind
        self.reason = reason
        self.again = again
        self.done = done


class Verdicts:
    """Counts since the last filled rollout, with two limits that end a run whose groups all come to nothing."""

    def __init__(self, args: RunConfig, group_filter: GroupFilter | None, ledger: Ledger):
        self.args = args
        self.group_filter = group_filter
        self.ledger = ledger
        self.filtered: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.retried = 0
        self.scored = 0
        self.stale = 0
        self.lost_in_a_row = 0
        self.carried = 0  # tokens that a next attempt went on with
        self.too_old_tokens = 0  # left out of the loss

    def passes(self, group: PromptGroup) -> bool:
        """Asks the filter about a scored group. Raises RuntimeError, with the counts, at group_filter_limit."""
        self.scored += 1
        self.lost_in_a_row = 0
        tokens = sum(len(sample.response_ids) for sample in group.samples)
        reason = self.group_filter(group) if self.group_filter is not None else None
        if reason is None:
            self.ledger.note("finished", group.group_index, attempt=group.attempt, tokens=tokens, version=group.oldest_version)
            return True
        self.ledger.note("filtered", group.group_index, attempt=group.attempt, tokens=tokens, reason=reason)
        self.filtered[reason] += 1
        size, limit = self.args.rollout_batch_size, self.args.group_filter_limit
        if (count := self.filtered.total()) >= limit * size:
            raise RuntimeError(
                f"--group-filter {self.args.group_filter} filtered {count} of {self.scored} groups ({_listed(self.filtered)}) "
                f"without filling one rollout of {size}; that is --group-filter-limit {limit} times the batch"
            )
        return False

    def retries(self, group: PromptGroup, failure: GroupFailed, kept: int = 0) -> bool:
        """Whether a failed group is started again, or goes on with `kept` tokens; else it is dropped for good.

        Raises:
            RuntimeError: as many groups in a row as a rollout has were dropped, so nothing but failures comes; or, with
                --deterministic, any failure that another run would not have.
        """
        if self.args.deterministic and failure.kind in TIMING:
            raise RuntimeError(
                f"{failure}; with --deterministic this ends the run, as another attempt would give other numbers: "
                "--resume goes on from the last checkpoint"
            ) from failure
        if failure.again and group.attempt < self.args.group_retries:
            self.ledger.note("retried", group.group_index, attempt=group.attempt, reason=failure.kind, detail=failure.reason, kept=kept)
            self.retried += 1
            self.carried += kept
            return True
        self.drop(group, failure.kind, failure.reason)
        self.lost_in_a_row += 1
        if self.lost_in_a_row >= max(self.args.rollout_batch_size, 2):
            raise RuntimeError(
                f"{self.lost_in_a_row} groups in a row failed and were dropped ({_listed(self.dropped)}); the last, {failure}"
            ) from failure
        return False

    def too_old(self, group: PromptGroup, lag: int) -> bool:
        """Whether a stale group is started again; else it is dropped.

        Raises:
            RuntimeError: at group_filter_limit, as an engine that gets no new weights makes every group stale for ever.
        """
        self.stale += 1
        size, limit, allowed = self.args.rollout_batch_size, self.args.group_filter_limit, self.args.max_weight_staleness
        if self.stale >= limit * size:
            raise RuntimeError(
                f"{self.stale} groups were too old (the last lags {lag} versions, --max-weight-staleness is {allowed}) without "
                f"one rollout of {size} being filled: do all engines get new weights?"
            )
        if self.args.staleness_policy != "drop":
            self.ledger.note("returned", group.group_index, attempt=group.attempt, reason="stale", lag=lag)
            return True
        self.drop(group, "stale", f"its oldest token lags {lag} versions, --max-weight-staleness is {allowed}")
        return False

    def trimmed(self, group: PromptGroup, lag: int, tokens: int, version: int) -> None:
        """The oldest `tokens` of a group are not trained; it is, with the rest, of which the oldest is of `version`."""
        self.ledger.note("trimmed", group.group_index, attempt=group.attempt, reason="stale", lag=lag, tokens=tokens, version=version)
        self.too_old_tokens += tokens

    def drop(self, group: PromptGroup, kind: str, reason: str) -> None:
        self.ledger.note("dropped", group.group_index, prompt=group.prompt_index, attempt=group.attempt, reason=kind, detail=reason)
        logger.warning(
            "dropped group %d (prompt %d) after attempt %d: %s", group.group_index, group.prompt_index, group.attempt + 1, reason
        )
        self.dropped[kind] += 1

    def state(self) -> dict[str, Any]:
        """What is counted, as JSON values."""
        return {
            "filtered": dict(self.filtered),
            "dropped": dict(self.dropped),
            "retried": self.retried,
            "scored": self.scored,
            "stale": self.stale,
            "lost_in_a_row": self.lost_in_a_row,
            "carried": self.carried,
            "too_old_tokens": self.too_old_tokens,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.filtered, self.dropped = Counter(state["filtered"]), Counter(state["dropped"])
        self.retried, self.scored, self.stale = state["retried"], state["scored"], state["stale"]
        self.lost_in_a_row = state["lost_in_a_row"]
        self.carried, self.too_old_tokens = state["carried"], state["too_old_tokens"]

    def settle(self) -> dict[str, float]:
        """The metrics of the rollout that was just filled; counting starts anew."""
        metrics = {
            "rollout/groups_filtered": float(self.filtered.total()),
            "rollout/groups_dropped": float(self.dropped.total()),
            "rollout/groups_retried": float(self.retried),
            "rollout/groups_stale": float(self.stale),
            "rollout/tokens_carried": float(self.carried),
            "rollout/tokens_too_old": float(self.too_old_tokens),
        }
        metrics |= {f"rollout/groups_filtered/{reason}": float(count) for reason, count in sorted(self.filtered.items())}
        metrics |= {f"rollout/groups_dropped/{kind}": float(count) for kind, count in sorted(self.dropped.items())}
        self.filtered.clear()
        self.dropped.clear()
        self.retried = self.scored = self.stale = self.carried = self.too_old_tokens = 0
        return metrics


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} x {reason}" for reason, count in sorted(counts.items()))
