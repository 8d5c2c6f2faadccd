"""Door: the end of tracking."""

from miles.tracking.tracking import finish as finish_tracking

__all__ = ["finish_tracking"]
