"""The first thing a driver does."""

from miles.config.run_config import RunConfig
from miles.ray.guard import tell_plainly
from miles.ray.wiring import check_machine, launch
from miles.ray.worker_manager import WorkerManager
from miles.rollout.preflight import check_run
from miles.tracking import tracking


def init_orchestration_script(args: RunConfig) -> WorkerManager:
    """Data, plugs and the number of CPUs are looked at, then come run folder, logging and tracking; then Ray, the object store, and
    the manager of the workers, which it returns."""
    tell_plainly()
    check_run(args)
    check_machine(args)
    tracking.init(args)
    return launch(args).manager
