"""Requests under way. One that is cut off by a publish is sent again with the tokens it has, so each part has one version.

A server's own way to hold requests through a publish differs between versions, keeps prefixes that older weights computed, and
does not always tell which token is of which version. Here the server is empty while its weights change (but in mode in_place),
and the caller of `fly` notices nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time

from miles.engines.embedded.stopping import Stopping
from miles.engines.sglang.client import PASSING, Client, ServerRefused
from miles.engines.sglang.flight import Flight
from miles.types import Completion, FinishReason, GenerateRequest

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 0.05
"""An abort that overtakes its request finds nothing to abort: it is sent again after so long."""
BROKEN_CONNECTIONS = 2
"""After which a request fails."""
BUSY_SECONDS = (0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
"""For which a request waits after each answer of "busy" (503 and the like), by up to half longer, so that not all come back at once."""


class Flights:
    """All requests of one engine.

    Args:
        stopping: the model's end tokens and its tokenizer.
        tells_versions: whether the server tells which tokens are of which version. Where it does not, a part that was running
            through a publish counts as written by the older weights.
        seeded: whether the server takes a seed for each request.
    """

    def __init__(self, client: Client, stopping: Stopping, *, max_context: int, tells_versions: bool, seeded: bool) -> None:
        self._client, self._stopping, self._max_context = client, stopping, max_context
        self._tells_versions, self._seeded = tells_versions, seeded
        self._flights: dict[str, Flight] = {}
        self._parts = 0
        self._news = asyncio.Event()
        self._cleanups: set[asyncio.Task[None]] = set()
        self.open = True  # whether parts may be sent
        self.version = 0
        self.tokens = self.tokens_cut = 0  # as in EngineHealth
        self.cache_key = "0"  # prefixes are shared only under an equal one
        self.last_progress = time.monotonic()

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._flights

    @property
    def running(self) -> list[Flight]:
        return [flight for flight in self._flights.values() if flight.running]

    @property
    def waiting(self) -> int:
        return len(self._flights) - len(self.running)

    def set_open(self, is_open: bool) -> None:
        if is_open and not self.open:
            self.last_progress = time.monotonic()
        self.open = is_open
        self._tell()

    async def fly(self, request: GenerateRequest) -> Completion:
        """From request to completion, through any number of publishes.

        Raises:
            ValueError: the server says that the request can never work.
            RuntimeError, OSError: the server failed.
        """
        sampling = request.sampling
        ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._stopping.eos_ids)
        flight = Flight(request, min(sampling.max_new_tokens, self._max_context - len(request.input_ids)), ends)
        self._flights[request.request_id] = flight
        try:
            while flight.finish is None:
                if await self._may_go(flight):
                    await self._part(flight)
                else:
                    flight.finish = FinishReason.ABORT
            return flight.completion()
        except asyncio.CancelledError:
            if flight.running:
                self._clean_up(flight.running)
            raise
        finally:
            if flight.finish in (None, FinishReason.ABORT):
                self.tokens_cut += len(flight.tokens)
            del self._flights[request.request_id]
            self._tell()

    async def cut(self, request_ids: frozenset[str] | None) -> int:
        """End requests (None: all) with what they have. Returns how many; when it returns they are off the server."""
        chosen = [flight for name, flight in self._flights.items() if (request_ids is None or name in request_ids) and not flight.cut]
        for flight in chosen:
            flight.cut = True
        self._tell()
        await self._off_the_server(chosen, everything=request_ids is None)
        return len(chosen)

    async def clear(self, *, end: bool) -> None:
        """Take everything that runs off the server; unless `end`, it goes on when `open` is set again."""
        running = self.running
        for flight in running:
            flight.cut_if_begun = end
        await self._off_the_server(running, everything=True)

    async def _may_go(self, flight: Flight) -> bool:
        while not flight.cut:
            if self.open:
                return True
            await self._news.wait()
        return False

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _off_the_server(self, flights: list[Flight], *, everything: bool) -> None:
        while still := [flight.running for flight in flights if flight.running]:
            for payload in [{"abort_all": True}] if everything else [{"rid": rid} for rid in still]:
                await self._client.post("/abort_request", payload)
            deadline = time.monotonic() + AGAIN_SECONDS
            while any(flight.running in still for flight in flights) and (left := deadline - time.monotonic()) > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), left)

    def _clean_up(self, rid: str) -> None:
        """The caller is gone: the server need not go on."""
        task = asyncio.get_running_loop().create_task(self._abort_quietly(rid))
        self._cleanups.add(task)
        task.add_done_callback(self._cleanups.discard)

    async def _abort_quietly(self, rid: str) -> None:
        try:
            await self._client.post("/abort_request", {"rid": rid})
        except (OSError, RuntimeError) as error:
            logger.debug("abort of %s: %r", rid, error)

    # ---- one part

    async def _part(self, flight: Flight) -> None:
        """Send what there is; add what comes back."""
        self._parts += 1
        if not self.running:
            self.last_progress = time.monotonic()
        flight.running, flight.version = f"{flight.request.request_id}#{self._parts}.", self.version
        busy: ServerRefused | None = None
        try:
            reply = await self._client.generate(flight.payload(seeded=self._seeded, cache_key=self.cache_key))
        except ServerRefused as error:
            if error.status == 400:
                raise ValueError(f"request {flight.request.request_id}: {error.message}") from None
            if error.status not in PASSING or flight.refused == len(BUSY_SECONDS):
                raise
            busy = error
        except OSError as error:
            self._again(flight, error)
            return
        finally:
            flight.running = ""
            self.last_progress = time.monotonic()
            self._tell()
        if busy is not None:
            await self._wait_out(flight, busy)
            return
        flight.refused = 0
        self.tokens += flight.add(reply, self._stopping, tells_versions=self._tells_versions, is_open=self.open)

    async def _wait_out(self, flight: Flight, error: ServerRefused) -> None:
        """A busy server is asked again later, and ever less often; a cut ends the wait."""
        seconds = BUSY_SECONDS[flight.refused] * random.uniform(1, 1.5)
        flight.refused += 1
        logger.warning("request %s waits %.1f s: %s", flight.request.request_id, seconds, error)
        end = time.monotonic() + seconds
        while not flight.cut and (left := end - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), left)

    def _again(self, flight: Flight, error: OSError) -> None:
        """A connection broke under a part, and the server lives: send it once more, under another id."""
        flight.broken += 1
        if flight.broken > BROKEN_CONNECTIONS:
            raise error
        logger.warning("request %s is sent again: %r", flight.request.request_id, error)
        self._clean_up(flight.running)
