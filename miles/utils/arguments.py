"""Door: the settings of a run."""

from miles.config.cli import parse_args
from miles.config.validate import validate_async_off_policy_correction

__all__ = ["parse_args", "validate_async_off_policy_correction"]
