"""Door: the healing loop."""

from miles.fault_tolerance.mini_ft_controller import maybe_start_mini_ft_controller

__all__ = ["maybe_start_mini_ft_controller"]
