"""[weights]: how new weights reach the engines, and how they are proved."""

from typing import Literal

from pydantic import Field

from miles.config.section import Section


class WeightsSection(Section):
    weight_transport: Literal["auto", "shared_memory", "cuda_ipc", "broadcast", "disk"] = "auto"
    """How weights travel; auto takes shared memory on one host's CPUs, CUDA IPC on one GPU, else broadcast, and logs why."""
    weight_bucket_mb: int = Field(256, ge=1)
    """Size of one bucket in MiB; a larger tensor gets a bucket of its own."""
    stage_weights: bool = True
    """Where trainer and engines share memory and there is room, have a whole copy of new weights ready before the engines pause."""
    weight_sync_dir: str | None = None
    """Where transport disk writes; default: the run folder. All hosts must see it."""
    verify_weight_updates: bool = True
    """Compare a checksum of every tensor on both ends at every publish."""
    publish_timeout: float = Field(600.0, gt=0)
    """Seconds that one publish may take."""
    bucket_timeout: float = Field(120.0, gt=0)
    """Seconds within which an engine must have received one bucket; past it, it is ended and the publish goes on without it."""
    publish_retries: int = Field(1, ge=0)
    """Times that a failed publish is tried again before the run ends."""
    check_weight_update_equal: bool = False
    """After the first publish, compare the engines' weights with those they loaded from hf_checkpoint."""
    check_weight_update_allow_quant_error: bool = False
    """Let quantised tensors differ by one unit in the last place."""
    check_weight_update_selector: Literal["all", "target", "draft"] = "all"
    """Which models of an engine are compared."""
    check_weight_update_skip_list: list[str] = Field(default_factory=list)
    """Tensors whose name contains one of these are reported, not compared."""
