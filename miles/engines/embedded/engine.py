"""The embedded engine's asynchronous face: it queues, the serving thread computes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from miles.config.run_config import RunConfig
from miles.engines.embedded.core import EngineCore
from miles.engines.embedded.serving import ServingThread, settle
from miles.types import Completion, EngineHealth, GenerateRequest, PauseMode, PublishPlan


class EmbeddedEngine:
    """One engine: a model, its slots, and one thread. Implements `miles.protocols.Engine`."""

    def __init__(self, args: RunConfig, name: str) -> None:
        self.name = name
        self._core = EngineCore(args, name)
        self._thread = ServingThread(name, self._core.step, self._core.has_work, self._core.fail)
        self._pending: set[str] = set()  # request ids sent and not answered
        self._disposed = False

    async def init(self) -> None:
        """Raises ValueError for a checkpoint that is missing or is no full-attention model."""
        self._thread.start()
        await self._thread.call(self._core.load)

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `Engine.generate`. A response also ends, by length, where `--engine-max-context` is reached.

        Raises:
            ValueError: the request can never work: an id out of the vocabulary, an empty or over-long input, a sampling
                value out of range, an id that is running already, a wave that contradicts itself.
            FloatingPointError: the model's logits for it are not finite.
            RuntimeError: the engine is disposed. A failed engine raises what it failed with.
        """
        self._check_open()
        request_id = request.request_id
        try:
            if request_id in self._pending:
                raise ValueError(f"request {request_id}: a request of this id is running already")
            self._core.limits.check(request)
        except ValueError:
            self._thread.post(lambda: self._core.note_refused(request))
            raise
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        self._pending.add(request_id)
        self._thread.post(lambda: self._core.submit(request, partial(settle, loop, future)))
        try:
            return await future
        except asyncio.CancelledError:
            self._thread.post(lambda: self._drop(request_id))
            raise
        finally:
            self._pending.discard(request_id)

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        return await self._call(self._core.abort, None if request_ids is None else frozenset(request_ids))

    async def pause(self, mode: PauseMode) -> None:
        """abort ends the requests that have begun; those that wait for a slot go on waiting."""
        await self._call(self._core.pause, mode)

    async def resume(self) -> None:
        await self._call(self._core.resume)

    async def begin_update(self, plan: PublishPlan, receiver_rank: int) -> None:
        await self._call(self._core.begin_update, plan, receiver_rank)

    async def receive_bucket(self, index: int) -> None:
        await self._call(self._core.receive_bucket, index)

    async def end_update(self) -> dict[str, str]:
        return await self._call(self._core.end_update)

    async def abort_update(self) -> None:
        """A publish that failed before its first bucket leaves the old weights whole, and the engine serving."""
        await self._call(self._core.abort_update)

    async def check_weights(self, action: str, **options: Any) -> dict[str, str]:
        """See `ServedWeights.check`."""
        return await self._call(self._core.check_weights, action, options)

    async def offload(self) -> None:
        await self._call(self._core.offload)

    async def onload(self) -> None:
        await self._call(self._core.onload)

    async def health(self) -> EngineHealth:
        return self._core.health(len(self._pending), self._thread.busy_seconds)

    async def dispose(self) -> None:
        if not self._disposed:
            self._disposed = True
            self._thread.post(self._core.dispose)
        await self._thread.stop()

    async def _call(self, function: Any, *args: Any) -> Any:
        self._check_open()
        return await self._thread.call(function, *args)

    def _check_open(self) -> None:
        if self._disposed:
            raise RuntimeError(f"engine {self.name} is disposed")
        if self._core.decoder is None and self._core.failure is None:
            raise RuntimeError(f"engine {self.name} has no model: init() comes first")

    def _drop(self, request_id: str) -> None:
        """On the thread: the caller of this request has gone."""
        self._core.abort(frozenset([request_id]))
