"""All settings of a run in one flat, typed, read-only object, which is at the same time each section's type."""

from typing import Any

from pydantic import ConfigDict, Field

from miles.config.algorithm import AlgorithmSection
from miles.config.checkpoint import CheckpointSection
from miles.config.data import DataSection
from miles.config.engine import EngineSection
from miles.config.evaluation import EvalSection
from miles.config.fault_tolerance import FaultToleranceSection
from miles.config.model import ModelSection
from miles.config.reward import RewardSection
from miles.config.rollout import RolloutSection
from miles.config.run import RunSection
from miles.config.section import Section
from miles.config.tracking import TrackingSection
from miles.config.train import TrainSection
from miles.config.weights import WeightsSection

SECTIONS: dict[str, type[Section]] = {
    "run": RunSection,
    "model": ModelSection,
    "data": DataSection,
    "rollout": RolloutSection,
    "reward": RewardSection,
    "algorithm": AlgorithmSection,
    "train": TrainSection,
    "engine": EngineSection,
    "weights": WeightsSection,
    "eval": EvalSection,
    "checkpoint": CheckpointSection,
    "tracking": TrackingSection,
    "fault_tolerance": FaultToleranceSection,
}
"""Table name in a TOML file -> section."""

WRITE_ONCE = ("num_rollout", "start_rollout_id")


class RunConfig(
    RunSection,
    ModelSection,
    DataSection,
    RolloutSection,
    RewardSection,
    AlgorithmSection,
    TrainSection,
    EngineSection,
    WeightsSection,
    EvalSection,
    CheckpointSection,
    TrackingSection,
    FaultToleranceSection,
):
    """Read-only, but for two fields that the functions the driver calls for it fill in once: num_rollout, start_rollout_id."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, validate_default=True)

    origins: dict[str, str] = Field(default_factory=dict, exclude=True)
    """Where each value that is not a default came from: "flag" or the file's name."""

    goes_on: bool = Field(default=False, exclude=True)
    """Whether this process goes on in the run's own folder, from a checkpoint."""

    def fill(self, **values: Any) -> None:
        """Set a write-once field that is still None, or to the value it has."""
        for name, value in values.items():
            assert name in WRITE_ONCE, f"{name} is read-only"
            assert getattr(self, name) in (None, value), f"{name} is already {getattr(self, name)}, not {value}"
            object.__setattr__(self, name, value)

    @property
    def run_dir(self) -> str:
        """The run's folder."""
        return f"{self.run_root}/{self.name}"

    @property
    def samples_per_rollout(self) -> int:
        return self.rollout_batch_size * self.n_samples_per_prompt

    @property
    def samples_per_step(self) -> int:
        """Samples that one optimizer step trains."""
        return self.global_batch_size or self.samples_per_rollout

    @property
    def checkpoint_dir(self) -> str:
        return self.save or f"{self.run_dir}/checkpoints"
