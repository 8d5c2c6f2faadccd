"""Fixtures of this room; see small_run."""

from tests.rollout.small_run import small_run, started_executors

__all__ = ["small_run", "started_executors"]
