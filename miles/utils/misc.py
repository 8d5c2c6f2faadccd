"""When periodic things are due."""

from miles.config.periodic import should_run_periodic_action

__all__ = ["should_run_periodic_action"]
