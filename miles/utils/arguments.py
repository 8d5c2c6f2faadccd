"""Door: the settings of a run."""

from miles.config.algorithm_rules import validate_async_off_policy_correction
from miles.config.cli import parse_args

__all__ = ["parse_args", "validate_async_off_policy_correction"]
