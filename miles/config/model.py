"""[model]: the model that is trained and served."""

from typing import Literal

from pydantic import Field

from miles.config.section import Section


class ModelSection(Section):
    hf_checkpoint: str = ""
    """Directory or hub name of a Hugging Face causal LM, or random:tiny and the like for a seeded random model of a known shape."""
    ref_checkpoint: str | None = None
    """Reference model for KL; default: hf_checkpoint. Loaded only when a KL coefficient is not 0."""
    teacher_checkpoint: str | None = None
    """Teacher of on-policy distillation: a model with the same tokenizer, held by the trainer. See teacher_coef."""
    teacher_urls: list[str] = Field(default_factory=list)
    """In the place of teacher_checkpoint: SGLang servers that hold the teacher. They score each sample as soon as it is written."""
    critic_checkpoint: str | None = None
    """Model that the critic starts from; default: hf_checkpoint."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the served weights and of the trainer's forward and backward pass; master weights stay float32."""
    attn_implementation: str = "sdpa"
    """Attention of the trainer's model: a name that transformers knows."""
    gradient_checkpointing: bool = False
    """Recompute layers in the backward pass to save memory."""
    trust_remote_code: bool = False
    """Let transformers run code that comes with a checkpoint."""

    @property
    def has_teacher(self) -> bool:
        return self.teacher_checkpoint is not None or bool(self.teacher_urls)
