"""[eval]: evaluation during a run."""

from typing import Literal

from pydantic import Field

from miles.config.section import Section


class EvalSection(Section):
    eval_interval: int | None = Field(None, ge=1)
    """Evaluate after every so many rollouts, at epoch ends and after the last; default: never."""
    eval_data: dict[str, str] = Field(default_factory=dict)
    """Evaluation sets: {name: path}, read like prompt_data."""
    skip_eval_before_train: bool = False
    """No evaluation before the first rollout."""
    eval_samples_per_prompt: int = Field(1, ge=1)
    """Answers per evaluation prompt; pass@k is reported for powers of two up to it."""
    eval_temperature: float = 0.0
    """Sampling temperature in evaluation; 0 is greedy."""
    eval_top_p: float = 1.0
    """Nucleus sampling in evaluation."""
    eval_max_response_length: int | None = Field(None, ge=1)
    """New tokens of one answer in evaluation; default: max_response_length."""
    eval_reward: str | None = None
    """Reward used in evaluation; default: reward."""
    eval_mode: Literal["shared", "snapshot"] = "shared"
    """shared: the training engines answer, and training waits. snapshot: an evaluator of your own gets an exported checkpoint."""
    eval_function: str | None = None
    """Snapshot mode: dotted path to `async def evaluate(hf_dir, rollout_id) -> dict of metrics`."""
    eval_max_in_flight: int = Field(2, ge=1)
    """Snapshot mode: evaluations that may run at once."""
    eval_when_busy: Literal["wait", "skip"] = "wait"
    """Snapshot mode, too many in flight: wait for the oldest, or skip this one with reason busy."""
    eval_hf_dir: str | None = None
    """Snapshot mode: where checkpoints are exported; default: in the run folder."""
    eval_keep_snapshots: int = Field(2, ge=1)
    """Snapshot mode: exported checkpoints that are kept."""
    eval_timeout: float = Field(3600.0, gt=0)
    """Seconds that one evaluation may take."""
