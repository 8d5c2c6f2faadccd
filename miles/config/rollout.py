"""[rollout]: how prompts become scored samples, and how old they may be."""

from typing import Literal

from pydantic import Field

from miles.config.section import Section


class RolloutSection(Section):
    num_rollout: int | None = Field(None, ge=1)
    """Rollouts of the whole run, resumed ones included; default: floor(rows / rollout_batch_size) x num_epoch."""
    start_rollout_id: int | None = Field(None, ge=0)
    """First rollout id; default: one after the restored checkpoint's, or 0."""
    rollout_batch_size: int = Field(8, ge=1)
    """Prompt groups in one rollout."""
    n_samples_per_prompt: int = Field(8, ge=1)
    """Siblings in one group."""
    fully_async: bool = False
    """A producer that never stops keeps groups in flight, also across publishes."""
    update_weights_interval: int = Field(1, ge=1)
    """Publish weights after every so many rollouts."""
    rollout_function: str | None = None
    """batch, fully_async, or a dotted path to a RolloutFn; default: by fully_async."""
    generate_function: str = "single_turn"
    """single_turn, multi_turn, or a dotted path to a GenerateFn of your own."""
    tool_functions: str | None = None
    """Dotted path to a table of the tools that multi_turn may run: {name: function}."""
    max_turns: int = Field(8, ge=1)
    """Turns of one multi_turn sample."""
    group_filter: str | None = None
    """reward_spread (keep groups whose rewards differ), or a dotted path to a GroupFilter."""
    group_filter_limit: int = Field(20, ge=1)
    """Stop with the counts once so many times the batch was filtered without filling one rollout."""
    max_weight_staleness: int = Field(2, ge=0)
    """Fully async: versions that the oldest token of a group may lag behind when it is drained."""
    staleness_policy: Literal["retry", "drop", "keep"] = "retry"
    """Fully async, groups with tokens that are too old: start the prompt again, or drop it. keep: no rollout waits for a straggler; it
    goes on across publishes, its tokens that got too old are left out of the loss, and the others are trained."""
    mask_offpolicy_in_partial_rollout: bool = False
    """Fully async: of a sample that several weight versions wrote, train the newest one's tokens only."""
    buffer_factor: float = Field(1.0, gt=0)
    """Fully async: finished groups that may wait, as a multiple of rollout_batch_size."""
    max_concurrent_groups: int | None = Field(None, ge=1)
    """Groups in flight at once; default: another one as soon as the engines have slots for its samples."""
    sample_timeout: float = Field(600.0, gt=0)
    """Seconds that generating and scoring one sample may take; past it the group is retried. Fully async it goes on from where it was."""
    group_retries: int = Field(2, ge=0)
    """Times that a failed group is started again before it is dropped, counted, and another prompt takes its place."""
    generate_timeout: float = Field(3600.0, gt=0)
    """Seconds that one rollout may take before the run ends, saying what it waited for."""
    temperature: float = 1.0
    """Sampling temperature in training; the trainer's log-probs use it too."""
    top_p: float = 1.0
    """Nucleus sampling in training; 1 is off."""
    top_k: int = 0
    """Sample among the k likeliest tokens; 0 is off."""
    min_p: float = 0.0
    """Leave out tokens below min_p times the likeliest one's probability; 0 is off."""
    max_response_length: int = Field(128, ge=1)
    """New tokens of one response, all turns together."""
    stop: list[str] = Field(default_factory=list)
    """Strings that end a response."""
    stop_token_ids: list[int] = Field(default_factory=list)
    """Token ids that end a response, beside the model's own."""
    ignore_eos: bool = False
    """Go on to the length limit (benchmarks)."""
