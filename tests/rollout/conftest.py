"""Fixtures of this room; see small_run."""

from tests.rollout.small_run import model_folder, small_run, started_executors

__all__ = ["model_folder", "small_run", "started_executors"]
