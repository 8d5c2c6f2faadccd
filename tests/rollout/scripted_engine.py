"""An engine for tests of scheduling: what it answers, when, and how it fails is scripted; nothing sleeps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from miles.types import Completion, EngineHealth, FinishReason, GenerateRequest, Likeliest, PauseMode, PublishPlan, VersionSpan

EOS = 2
Answer = Callable[[GenerateRequest], Completion | Exception | None]


def by_seed(request: GenerateRequest, version: int = 0) -> Completion:
    """A few tokens that depend on the seed alone."""
    count = min(2 + request.sampling.seed % 4, request.sampling.max_new_tokens)
    tokens = [300 + (request.sampling.seed >> (4 * place)) % 90 for place in range(count - 1)]
    return complete(request, [*tokens, EOS], version)


def complete(request: GenerateRequest, tokens: list[int], version: int = 0, reason: FinishReason = FinishReason.STOP) -> Completion:
    spans = [VersionSpan(0, len(tokens), version)]
    return Completion(request.request_id, tokens, [-0.5] * len(tokens), reason, spans, likeliest=likeliest(tokens, request))


def likeliest(tokens: list[int], request: GenerateRequest) -> Likeliest | None:
    """The token and its successors, if that is asked for."""
    if not (count := request.sampling.num_likeliest):
        return None
    ids = np.array(tokens, np.int32)[:, None] + np.arange(count, dtype=np.int32)
    return Likeliest(ids, np.full(ids.shape, -0.7, np.float32))


class ScriptedEngine:
    """`answer(request)` gives a completion, an exception to raise, or None for the default.

    With `hold`, a request waits until `release` names it (by the start of its id) or `release_all`. Its first token has the
    version of its arrival, its others that of its release. A wave starts when it is complete.
    """

    def __init__(self, answer: Answer | None = None, *, hold: bool = False) -> None:
        self.answer = answer or (lambda request: None)
        self.hold = hold
        self.version = 0
        self.requests: list[GenerateRequest] = []  # in order of arrival
        self.held: dict[str, asyncio.Future[str]] = {}
        self.waves: dict[str, list[GenerateRequest]] = {}
        self.wave_started: dict[str, asyncio.Event] = {}
        self.aborted: list[str] = []
        self.running = 0
        self.most_running = 0

    async def init(self) -> None: ...

    async def generate(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        started = self.version
        try:
            await self._wave(request)
            if self.hold:
                gate = self.held[request.request_id] = asyncio.get_running_loop().create_future()
                if await gate == "abort":
                    return complete(request, [300], started, FinishReason.ABORT)
            return self._answer(request, started)
        except asyncio.CancelledError:
            self.aborted.append(request.request_id)
            raise
        finally:
            self.held.pop(request.request_id, None)
            self.running -= 1

    async def _wave(self, request: GenerateRequest) -> None:
        if (wave := request.wave) is None:
            return
        members = self.waves.setdefault(wave.wave_id, [])
        members.append(request)
        event = self.wave_started.setdefault(wave.wave_id, asyncio.Event())
        assert len(members) <= wave.size
        if len(members) == wave.size:
            assert sorted(member.wave.order for member in members if member.wave) == list(range(wave.size))
            event.set()
        await event.wait()

    def _answer(self, request: GenerateRequest, started: int) -> Completion:
        answer = self.answer(request)
        if isinstance(answer, Exception):
            raise answer
        if answer is not None:
            return answer
        completion = by_seed(request, self.version)
        count = len(completion.token_ids)
        if started != self.version and count > 1:
            completion.version_spans = [VersionSpan(0, 1, started), VersionSpan(1, count, self.version)]
        return completion

    def release(self, prefix: str) -> int:
        found = [gate for request_id, gate in self.held.items() if request_id.startswith(prefix) and not gate.done()]
        for gate in found:
            gate.set_result("go")
        return len(found)

    def release_all(self) -> int:
        return self.release("")

    def groups_held(self) -> list[int]:
        """Indices of the groups with a held request, in order of arrival."""
        held = [request_id for request_id, gate in self.held.items() if not gate.done()]
        return list(dict.fromkeys(int(request_id.split("-g")[1].split(".")[0]) for request_id in held))

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        chosen = [gate for request_id, gate in self.held.items() if request_ids is None or request_id in request_ids]
        for gate in chosen:
            if not gate.done():
                gate.set_result("abort")
        return len(chosen)

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def begin_update(self, plan: PublishPlan, receiver_rank: int = 0) -> None: ...

    async def receive_bucket(self, index: int) -> None: ...

    async def end_update(self) -> dict[str, str]:
        return {}

    async def abort_update(self) -> None: ...

    async def check_weights(self, action: str, **options: Any) -> dict[str, str]:
        return {}

    async def offload(self) -> None: ...

    async def onload(self) -> None: ...

    async def health(self) -> EngineHealth:
        return EngineHealth(True, self.version, self.running, 0, paused=False)

    async def dispose(self) -> None: ...
