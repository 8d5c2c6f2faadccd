"""Which rollout function a run has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from miles.config.run_config import RunConfig
from miles.plugins import load

BUILTIN = {
    "batch": "miles.rollout.batch_rollout.BatchRollout",
    "fully_async": "miles.rollout.fully_async_rollout.FullyAsyncRollout",
    "scheduled": "miles.rollout.scheduled_rollout.ScheduledRollout",
}


def load_rollout_function(args: RunConfig) -> Callable[..., Any]:
    """What --rollout-function names, or the mode's own: a class to be built with (args, context)."""
    usual = "batch" if not args.fully_async else "scheduled" if args.deterministic else "fully_async"
    found: Callable[..., Any] = load(args.rollout_function or usual, BUILTIN, setting="--rollout-function")
    return found
