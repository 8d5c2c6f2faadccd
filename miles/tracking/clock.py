"""The time of a run: that of the wall clock when the process began, and from there on never back."""

import time

_BEGAN = time.time() - time.monotonic()


def now() -> float:
    """Seconds since 1970. What is measured between two calls stays right when somebody sets the machine's clock."""
    return _BEGAN + time.monotonic()
