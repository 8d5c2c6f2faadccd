"""Trying again, with an end to it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


def backoff(failures: int, base: float = 5.0, limit: float = 300.0) -> float:
    """Seconds to wait after so many failures before: min(base x 2^failures, limit)."""
    return min(base * 2.0 ** min(failures, 60), limit)


async def retry(
    action: Callable[[], Awaitable[T]],
    *,
    what: str,
    retries: int,
    retry_on: tuple[type[Exception], ...],
    base: float = 0.2,
    limit: float = 5.0,
    timeout: float | None = None,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> T:
    """The result of `action`, tried up to 1 + `retries` times.

    Args:
        action: makes a new awaitable for each try.
        what: what is tried, for the log ("pause engine-0").
        retry_on: errors worth another try; a TimeoutError by `timeout` is one when it is among them. Others pass at once.
        base, limit: back-off between tries, see `backoff`.
        timeout: seconds for one try.

    Raises:
        The last try's error, with how often it was tried as a note.
    """
    for tried in range(retries + 1):
        try:
            return await asyncio.wait_for(action(), timeout)
        except retry_on as error:
            if tried == retries:
                error.add_note(f"{what}: tried {tried + 1} times")
                raise
            pause = backoff(tried, base, limit)
            logger.warning("%s failed (%s: %s); again in %.1f s", what, type(error).__name__, error, pause)
            await sleep(pause)
    raise AssertionError("unreachable")
