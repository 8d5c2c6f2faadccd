"""Freeing what lies in the object store, once every consumer is done."""

from miles.config.run_config import RunConfig
from miles.ray.run import current
from miles.types import RolloutDataRef, TrainOutputRef


def remove_rollout_data_refs(args: RunConfig, ref: RolloutDataRef | None) -> None:
    """Free a rollout's shares. None is fine, and so is a second call."""
    if ref is not None:
        current().manager.store.free(ref.shares)


def remove_train_output_refs(ref: TrainOutputRef | None) -> None:
    """Free a critic's values. None is fine, and so is a second call."""
    if ref is not None:
        current().manager.store.free(ref.shares)
