"""The first thing a driver does."""

from miles.config.run_config import RunConfig
from miles.ray.wiring import launch
from miles.ray.worker_manager import WorkerManager
from miles.tracking import tracking


def init_orchestration_script(args: RunConfig) -> WorkerManager:
    """Run folder, logging and tracking; then Ray, the object store, and the manager of the workers, which it returns."""
    tracking.init(args)
    return launch(args).manager
