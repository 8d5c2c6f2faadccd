"""[run]: the run as a whole and the processes it is made of."""

from typing import Literal

from pydantic import Field

from miles.config.section import Section


class RunSection(Section):
    name: str = "run"
    """Name of the run; its folder is RUN_ROOT/NAME. A folder with results of that name is moved aside, never overwritten."""
    run_root: str = "runs"
    """Folder that holds the run folders."""
    seed: int = 0
    """Seed of everything random: data order, sampling, initial value head."""
    deterministic: bool = False
    """The same seed gives the same bits, fully asynchronous too; what depends on timing (a lost engine, a passed limit) ends the run."""
    in_process: bool = False
    """Host all workers in this one process instead of Ray actors (debugging, fast tests)."""
    ray_address: str | None = None
    """Address of a running Ray cluster to join ("auto", "host:port"); RAY_ADDRESS works too. Without it a local Ray is started."""
    verify_first_step: bool = False
    """Check weights, ids, sampling, log-probs, ratio, KL and gold rewards of the first step; what is wrong ends the run, by its kind."""
    debug_exit_after_rollout: int | None = Field(None, ge=1)
    """Stop cleanly after so many rollouts of this process."""
    debug_kill: str | None = None
    """POINT@ROLLOUT: the process that gets to this point of `miles/fault_tolerance/kill_points.py` is killed there (tests of resuming)."""
    colocate: bool = False
    """Trainer and engines take turns on the same devices (train.py only)."""
    offload_train: bool = False
    """Move a trainer's weights and optimizer to host memory when it is not training."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where models live; auto takes a GPU if there is one."""
    num_trainers: int = Field(1, ge=1)
    """Data-parallel ranks of the actor (and of the critic). A step's samples need not divide by it: shares are cut by tokens, and the
    loss does not depend on them."""
    gpus_per_trainer: float = Field(1.0, gt=0)
    """GPU share of one trainer rank; below 1 several workers share a GPU. Unused on CPU."""
    cpus_per_trainer: float = Field(1.0, ge=0)
    """CPU slots that one trainer rank takes from Ray."""
    trainer_threads: int | None = Field(None, ge=1)
    """torch threads of one trainer rank; default: 1 on CPU where trainer and engine overlap."""
    worker_start_timeout: float = Field(180.0, gt=0)
    """Seconds within which a worker process must be up."""
    train_timeout: float = Field(3600.0, gt=0)
    """Seconds that one call of a trainer may take before the run ends, saying what it waited for."""
    shutdown_timeout: float = Field(20.0, gt=0)
    """Seconds that workers get to end by themselves before they are ended."""
