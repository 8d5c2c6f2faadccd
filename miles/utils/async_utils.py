"""Starting something now and awaiting it later."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def eager_create_task(coro: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Create a task and let it run up to its first wait, so that its first remote call is on its way when this returns."""
    task = asyncio.get_running_loop().create_task(coro)
    await asyncio.sleep(0)
    return task
