"""[checkpoint]: saving and resuming."""

from pydantic import Field

from miles.config.section import Section


class CheckpointSection(Section):
    save: str | None = None
    """Where checkpoints go; default: checkpoints/ in the run folder."""
    save_interval: int | None = Field(None, ge=1)
    """Save after every so many rollouts, at epoch ends and after the last; default: never."""
    load: str | None = None
    """Checkpoint directory to resume from: the newest complete and undamaged one in it; or one checkpoint."""
    keep_checkpoints: int | None = Field(None, ge=1)
    """Keep only the newest so many complete ones; default: all."""
    keep_best_metric: str | None = None
    """With keep_checkpoints, also keep the one whose evaluation was best by this metric, such as eval/NAME/reward; -METRIC: the lowest."""
    save_hf: bool = False
    """Export a Hugging Face checkpoint beside each saved one."""
    save_trigger_sentinel: str | None = None
    """A file whose appearance asks for a save at the end of the current rollout; answered in FILE.saved."""
    save_on_signal: bool = True
    """Save on SIGTERM and Ctrl-C, at the end of the current step."""
    save_grace: float = Field(20.0, ge=0)
    """Seconds that a save on a signal waits for the rollout that is being generated; past them that rollout is started again on resume.
    They begin when the training under way is done, which is waited for however long it takes, or at once between two trainings."""
