"""[train]: the optimizer, batches and micro-batches."""

from typing import Literal

from pydantic import Field

from miles.config.section import Section


class TrainSection(Section):
    global_batch_size: int | None = Field(None, ge=1)
    """Samples per optimizer step; default: all samples of a rollout."""
    max_tokens_per_micro_batch: int = Field(4096, ge=1)
    """Tokens of one forward and backward pass; longer samples get one of their own."""
    share_prompts: bool = True
    """Compute a prompt once for its siblings in one micro-batch, with an attention mask that keeps them apart (sdpa, eager)."""
    lr: float = Field(1e-6, gt=0)
    """Peak learning rate of the actor."""
    critic_lr: float = Field(1e-5, gt=0)
    """Peak learning rate of the critic."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after warm-up, over the optimizer steps of the whole run."""
    lr_warmup_steps: int = Field(0, ge=0)
    """Optimizer steps in which the learning rate rises from 0."""
    min_lr: float = Field(0.0, ge=0)
    """Where linear and cosine end."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled weight decay; not on vectors (norms, biases)."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW beta 1."""
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW beta 2."""
    adam_eps: float = Field(1e-8, gt=0)
    """AdamW epsilon."""
    lora_rank: int = Field(0, ge=0)
    """Rank of low-rank adapters, which are trained instead of the model's own weights; 0 is off. See docs/training.md."""
    lora_alpha: float = Field(32.0, gt=0)
    """What an adapter adds is multiplied by lora_alpha / lora_rank."""
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout of an adapter's input in training passes. Deterministic, but the trained policy is then another than the engines'."""
    lora_targets: list[str] = Field(default_factory=list)
    """Linear layers of the blocks that get an adapter, by name (q_proj, mlp.up_proj); default: all."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this norm."""
