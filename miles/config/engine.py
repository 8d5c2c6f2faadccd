"""[engine]: the inference engines. Options of a real SGLang server pass through the table [sglang]."""

from typing import Literal

from pydantic import Field

from miles.config.section import Section


class EngineSection(Section):
    engine: Literal["embedded"] = "embedded"
    """embedded: our own small engine, on any device."""
    num_engines: int = Field(1, ge=1)
    """Inference engines."""
    gpus_per_engine: float = Field(1.0, gt=0)
    """GPU share of one engine; below 1 several workers share a GPU. Unused on CPU."""
    cpus_per_engine: float = Field(1.0, ge=0)
    """CPU slots that one engine takes from Ray."""
    engine_threads: int | None = Field(None, ge=1)
    """torch threads of one embedded engine; default: 1 on CPU where trainer and engine overlap."""
    engine_max_running: int = Field(64, ge=1)
    """Requests that one engine decodes side by side."""
    engine_max_context: int = Field(1024, ge=2)
    """Tokens of prompt and response together that one request may have."""
    engine_prefill_tokens: int = Field(2048, ge=1)
    """Prompt tokens that one prefill step of the embedded engine computes."""
    engine_cuda_graphs: bool = True
    """On a GPU the embedded engine replays its decode steps as CUDA graphs; a step of a size not met before takes longer once."""
    pause_mode: Literal["retract", "in_place", "abort"] = "retract"
    """What a publish does to running requests: compute their KV cache anew, keep it, or cut them off."""
    engine_start_timeout: float = Field(300.0, gt=0)
    """Seconds within which an engine must be ready."""
    engine_stuck_timeout: float = Field(120.0, gt=0)
    """Seconds without a token, while requests run and the engine is not paused, after which it counts as unhealthy."""
