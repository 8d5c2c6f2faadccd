"""[engine]: the inference engines."""

from typing import Any, Literal

from pydantic import Field

from miles.config.section import Section


class EngineSection(Section):
    engine: Literal["embedded", "sglang"] = "embedded"
    """embedded: our own small engine, on any device. sglang: a real SGLang server for each engine."""
    num_engines: int = Field(1, ge=1)
    """Inference engines."""
    gpus_per_engine: float = Field(1.0, gt=0)
    """GPU share of one engine; below 1 several workers share a GPU, above it SGLang is tensor parallel. Unused on CPU."""
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
    sglang_python: str | None = None
    """Interpreter that has sglang; default: this one."""
    sglang_urls: list[str] = Field(default_factory=list)
    """Servers that run already, one for each engine; they are neither started nor ended."""
    sglang_seeds: bool = True
    """Give SGLang a seed for each request, so that a response can be had again; sampling takes a little longer."""
    sglang: dict[str, Any] = Field(default_factory=dict)
    """Options of SGLang's server by its own names, { mem_fraction_static = 0.5 }; they are stronger than what miles sets."""
