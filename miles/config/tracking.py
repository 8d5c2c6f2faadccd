"""[tracking]: what a run tells, and where."""

from typing import Literal

from pydantic import Field

from miles.config.section import Section


class TrackingSection(Section):
    trackers: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = Field(default_factory=list)
    """Where metrics go beside metrics.jsonl. A tracker that fails is switched off and never stops a run."""
    tracking_project: str = "miles"
    """Project or experiment name at the tracker."""
    console: Literal["auto", "live", "plain", "quiet"] = "auto"
    """Progress on the terminal: a live view, plain lines, or nothing; auto takes the live view on a terminal."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least serious message that is logged."""
    save_samples: int = Field(8, ge=0)
    """Samples of each rollout that are written to samples/, spread over its groups."""
    stall_timeout: float = Field(600.0, gt=0)
    """Seconds without progress after which the run says who waits for whom, with the workers' stacks."""
