"""The SGLang engine: one server, started here or attached to, behind the same protocol as the embedded engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from miles.config.run_config import RunConfig
from miles.engines.embedded.requests import Limits
from miles.engines.sglang.checkpoint import describe
from miles.engines.sglang.client import Client
from miles.engines.sglang.commands import Commands
from miles.engines.sglang.flights import Flights
from miles.engines.sglang.server import FACTS, Server, facts_of
from miles.engines.sglang.starting import spawn, turn
from miles.engines.sglang.versions import Version
from miles.types import Completion, EngineHealth, GenerateRequest, PauseMode, PublishPlan
from miles.weights.broadcast_group import address_toward

logger = logging.getLogger(__name__)

SOONER = 0.95
"""Part of the limit after which a start is given up here: whoever called has the same limit, and does not know the server's log."""
DESCRIPTORS = 65536  # a connection for each request in flight


class SGLangEngine:
    """One engine. Implements `miles.protocols.Engine`.

    Waves are not kept together: SGLang admits requests as they come, so its batches, and the last bits of its results, depend
    on timing.
    """

    def __init__(self, args: RunConfig, name: str, url: str = "") -> None:
        """
        Args:
            url: of a server that runs already; it is neither started nor ended here.
        """
        self.args, self.name, self._url = args, name, url
        self._server: Server | None = None
        self._client: Client | None = None
        self._commands: Commands | None = None
        self._flights: Flights | None = None
        self._limits = Limits(vocabulary=0, max_context=args.engine_max_context, has_tokenizer=False)
        self._version = Version("")
        self._plan: PublishPlan | None = None
        self._receiver_rank = 0
        self._mode: PauseMode | None = None  # how it is paused
        self._offloaded = self._session = self._disposed = False
        self._intact, self._unproven = True, False  # as in ServedWeights
        self._epoch = 0  # of the prefix cache
        self._fingerprint: tuple[Any, ...] = ()  # of the server's load

    # ---- start

    async def init(self) -> None:
        """Raises ValueError for a checkpoint or an interpreter that cannot work, ServerGone or TimeoutError with the server's log."""
        args, begin = self.args, time.monotonic()
        _raise_descriptor_limit()
        model = await asyncio.to_thread(describe, args)
        self._limits = Limits(model.vocabulary, args.engine_max_context, model.stopping.tokenizer is not None)
        left, limit = SOONER * args.engine_start_timeout, f"--engine-start-timeout {args.engine_start_timeout:g} s"
        if self._url:
            client = self._client = Client(self._url, timeout=args.control_timeout, check=lambda: None)
            facts = await facts_of(self._url, client, args.engine_max_context)
        else:
            async with turn(args, left):
                server = self._server = await spawn(args, model, self.name)
                client = self._client = Client(server.url, timeout=args.control_timeout, check=server.check)
                await server.ready(client, left - (time.monotonic() - begin), limit)
            facts = await client.get(FACTS)
        self._version = Version.of(facts["version"])
        seeded = facts["sampling_backend"] == "pytorch" and args.sglang_seeds
        self._flights = Flights(
            client,
            model.stopping,
            max_context=args.engine_max_context,
            tells_versions=self._version.version_spans,
            seeded=seeded,
        )
        target = urlsplit(client.url)
        host = address_toward(target.hostname or "127.0.0.1", target.port or 80)
        self._commands = Commands(client, ranks=facts["tp_size"], host=host, timeout=args.publish_timeout)
        async with self._update_session():
            arguments = {"tensors": model.tensors, "timeout": args.publish_timeout, "seeded": seeded}
            await self._commands.run("describe", weight_version="0", **arguments)
            if args.check_weight_update_equal:
                await self._commands.run("check", action="snapshot", options={})
        logger.info("engine %s: SGLang %s at %s, ready in %.1f s", self.name, self._version.text, client.url, time.monotonic() - begin)

    # ---- requests

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `Engine.generate`. A response also ends, by length, where `--engine-max-context` is reached.

        Raises:
            ValueError: the request can never work; it does not reach the server, which an unknown token id would end.
            RuntimeError: the engine is disposed, or the server failed or has ended.
        """
        flights = self._ready()[0]
        if request.request_id in flights:
            raise ValueError(f"request {request.request_id}: a request of this id is running already")
        self._limits.check(request)
        return await flights.fly(request)

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """While paused in_place, requests that run are cut off at the next resume."""
        return await self._ready()[0].cut(None if request_ids is None else frozenset(request_ids))

    # ---- pauses

    async def pause(self, mode: PauseMode) -> None:
        """retract and abort leave the server empty. abort ends the requests that have begun; those that wait go on waiting."""
        if mode not in ("retract", "in_place", "abort"):
            raise ValueError(f"pause mode {mode!r} is none of retract, in_place, abort")
        flights, client, _ = self._ready()
        if self._mode == "in_place" and mode != "in_place":
            await client.post("/continue_generation")
        elif self._mode is not None:
            return
        self._mode = mode
        flights.set_open(False)
        if mode != "in_place":
            await flights.clear(end=mode == "abort")
        # the server's own pause also holds whoever else talks to it
        await client.post("/pause_generation", {"mode": "in_place" if mode == "in_place" else "retract"})

    async def resume(self) -> None:
        flights, client, _ = self._ready()
        self._unproven = False
        if self._mode is not None:
            await client.post("/continue_generation")
            self._mode = None
        flights.set_open(self._may_serve)

    @property
    def _may_serve(self) -> bool:
        return self._mode is None and not self._offloaded and self._intact

    # ---- publishes

    async def begin_update(self, plan: PublishPlan, receiver_rank: int) -> None:
        flights = self._ready()[0]
        if not plan.staged:
            self._check_paused()
        if self._offloaded:
            raise RuntimeError(f"engine {self.name}: a publish needs its weights on the device; call onload first")
        if plan.version < flights.version:
            raise ValueError(f"engine {self.name}: weight version {plan.version} is older than its own, {flights.version}")
        self._plan, self._receiver_rank = plan, receiver_rank
        if not plan.staged:
            await self._begin(plan)

    async def _begin(self, plan: PublishPlan) -> None:
        await self._open_session()
        await self._ready()[2].run("begin", plan=plan, receiver_rank=self._receiver_rank)

    def _check_paused(self) -> None:
        if self._mode is None:
            raise RuntimeError(f"engine {self.name}: a publish needs a paused engine")

    async def receive_bucket(self, index: int) -> None:
        assert self._plan is not None, "receive_bucket before begin_update"
        self._intact = False
        await self._ready()[2].run("receive", index=index)

    async def end_update(self) -> dict[str, str]:
        flights, _, commands = self._ready()
        plan = self._plan
        assert plan is not None, "end_update before begin_update"
        self._check_paused()
        if plan.staged:
            await self._begin(plan)
            self._intact = False
        checksums = await commands.run("finish", weight_version=str(plan.version))
        await self._close_session()
        self._plan = None
        flights.version = plan.version
        await self._forget_prefixes()
        self._intact = self._unproven = True
        return checksums

    async def abort_update(self) -> None:
        """A publish that failed before its first bucket leaves the old weights whole, and the engine serving."""
        _, _, commands = self._ready()
        self._plan = None
        if self._unproven:
            self._intact = self._unproven = False
        if self._session:
            await commands.run("abort")
            await self._close_session()

    async def check_weights(self, action: str, **options: Any) -> dict[str, str]:
        """See `ServedWeights.check`."""
        _, client, commands = self._ready()
        free = self._mode is None
        if free:
            await client.post("/pause_generation", {"mode": "in_place"})
        try:
            async with self._update_session():
                found = await commands.run("check", action=action, options=options)
            if action == "reset_tensors":
                await self._forget_prefixes()
        finally:
            if free:
                await client.post("/continue_generation")
        return found

    @contextlib.asynccontextmanager
    async def _update_session(self) -> AsyncIterator[None]:
        await self._open_session()
        try:
            yield
        finally:
            await self._close_session()

    async def _open_session(self) -> None:
        if self._version.update_session and not self._session:
            await self._ready()[1].post("/begin_weight_update")
        self._session = True

    async def _close_session(self) -> None:
        if self._version.update_session and self._session:
            await self._ready()[1].post("/end_weight_update")
        self._session = False

    async def _forget_prefixes(self) -> None:
        """Nothing that other weights computed is shared from here on. The flush only frees room: a server that holds requests refuses."""
        flights, client, _ = self._ready()
        self._epoch += 1
        flights.cache_key = str(self._epoch)
        await client.post("/flush_cache", accept=(400,))

    # ---- memory, health, end

    async def offload(self) -> None:
        """Weights and cache leave a GPU, where `enable_memory_saver` is on (it is with --colocate). Requests wait until onload."""
        flights, client, _ = self._ready()
        if not self._offloaded:
            self._offloaded = True
            flights.set_open(False)
            await flights.clear(end=False)
            await client.post("/release_memory_occupation")

    async def onload(self) -> None:
        flights, client, _ = self._ready()
        if self._offloaded:
            await client.post("/resume_memory_occupation")
            self._offloaded = False
            await self._forget_prefixes()
            flights.set_open(self._may_serve)

    async def health(self) -> EngineHealth:
        """Looks at the process, asks the server's HTTP side, and counts how long no token came: any of them alone can be wrong.

        Raises:
            ServerGone: the process has ended.
            OSError: the server does not answer.
        """
        flights = self._flights
        if self._disposed or flights is None or self._client is None:
            return EngineHealth(False, 0, 0, 0, paused=False, reason="disposed" if self._disposed else "not loaded")
        if self._server is not None:
            self._server.check()
        working = self._may_serve and bool(flights.running)
        if not self._session:
            loads = await self._client.get("/v1/loads", timeout=self.args.health_timeout)
            # a snapshot of the scheduler's: it changes while tokens are computed
            fields = ("num_used_tokens", "num_running_reqs", "num_waiting_reqs", "num_waiting_uncached_tokens", "gen_throughput")
            fingerprint = tuple(load[field] for load in loads["loads"] for field in fields)
            if fingerprint != self._fingerprint:
                self._fingerprint, flights.last_progress = fingerprint, time.monotonic()
        broken = not self._intact and self._plan is None
        return EngineHealth(
            healthy=not broken,
            weight_version=flights.version,
            running=len(flights.running),
            waiting=flights.waiting,
            paused=self._mode is not None,
            stuck_seconds=time.monotonic() - flights.last_progress if working else 0.0,
            reason="a publish was cut off half way or came out wrong: nothing is served until a whole one succeeds" if broken else "",
            tokens=flights.tokens,
            tokens_cut=flights.tokens_cut,
        )

    async def dispose(self) -> None:
        if self._disposed:
            return
        self._disposed = True
        if self._flights is not None:
            with contextlib.suppress(OSError, RuntimeError):
                async with asyncio.timeout(2):
                    await self._flights.cut(None)
        if self._server is not None:
            await asyncio.to_thread(self._server.kill)
        elif self._session or self._mode is not None:
            await self._let_go()
        for part in (self._commands, self._client):
            if part is not None:
                await part.close()

    async def _let_go(self) -> None:
        """An attached server outlives us: it is left running as it was found."""
        assert self._client is not None
        with contextlib.suppress(OSError, RuntimeError):
            if self._session and self._version.update_session:
                await self._client.post("/end_weight_update", accept=(400,))
            await self._client.post("/continue_generation")

    def _ready(self) -> tuple[Flights, Client, Commands]:
        if self._disposed:
            raise RuntimeError(f"engine {self.name} is disposed")
        if self._flights is None or self._client is None or self._commands is None:
            raise RuntimeError(f"engine {self.name} has no model: init() comes first")
        return self._flights, self._client, self._commands


def _raise_descriptor_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
