"""Requests under way. One that is cut off by a publish is sent again with the tokens it has, so each part has one version.

A server's own way to hold requests through a publish differs between versions, keeps prefixes that older weights computed, and
does not always tell which token is of which version. Here the server is empty while its weights change (but in mode in_place),
and the caller of `fly` notices nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from miles.engines.embedded.sequence import stacked
from miles.engines.embedded.stopping import Stopping
from miles.engines.sglang.client import PASSING, Client, ServerRefused
from miles.types import Completion, FinishReason, GenerateRequest, VersionSpan

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 0.05
"""An abort that overtakes its request finds nothing to abort: it is sent again after so long."""
BROKEN_CONNECTIONS = 2
"""After which a request fails."""
BUSY_SECONDS = (0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
"""For which a request waits after each answer of "busy" (503 and the like), by up to half longer, so that not all come back at once."""
SEED_BITS = (1 << 63) - 1
ALL_TOKENS = 1 << 30
"""SGLang's top_k of all tokens. It keeps 32 bits, and a larger number would end the server."""
REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


@dataclass(slots=True, eq=False)
class Flight:
    """One request, and what was written for it so far."""

    request: GenerateRequest
    longest: int  # tokens of the response
    stop_ids: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # [tokens]
    likeliest: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)  # [tokens], where asked for
    spans: list[VersionSpan] = field(default_factory=list)
    finish: FinishReason | None = None
    running: str = ""  # the server's id of the part that it has now
    version: int = 0  # of the weights when that part was sent
    cut: bool = False  # somebody wants it ended
    cut_if_begun: bool = False  # so does a pause, unless it was still waiting
    cached: int = 0
    cache_spans: list[VersionSpan] = field(default_factory=list)
    broken: int = 0  # connections that broke under it
    refused: int = 0  # times in a row that the server was too busy for it

    def completion(self) -> Completion:
        assert self.finish is not None
        stale = sum(span.end - span.start for span in self.cache_spans)
        return Completion(
            self.request.request_id,
            self.tokens,
            self.logprobs,
            self.finish,
            self.spans,
            self.cached,
            stale,
            self.cache_spans,
            likeliest=stacked(self.likeliest, self.request.sampling.num_likeliest),
        )


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
            reply = await self._client.generate(self._payload(flight))
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
        self._add(flight, reply)

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

    def _payload(self, flight: Flight) -> dict[str, Any]:
        sampling = flight.request.sampling
        params: dict[str, Any] = {
            "max_new_tokens": flight.longest - len(flight.tokens),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": min(sampling.top_k or ALL_TOKENS, ALL_TOKENS),
            "min_p": sampling.min_p,
            "ignore_eos": sampling.ignore_eos,
            "stop_token_ids": sorted(flight.stop_ids),
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        }
        if sampling.stop:
            params["stop"] = list(sampling.stop)
        if self._seeded:
            params["sampling_seed"] = sampling.seed & SEED_BITS
        return {
            "rid": flight.running,
            "input_ids": flight.request.input_ids + flight.tokens,
            "sampling_params": params,
            "return_logprob": True,
            "top_logprobs_num": sampling.num_likeliest,
            "extra_key": self.cache_key,
        }

    def _add(self, flight: Flight, reply: dict[str, Any]) -> None:
        meta, name = reply["meta_info"], flight.request.request_id
        pairs = meta.get("output_token_logprobs") or []
        ids = [pair[1] for pair in pairs]
        if ids != list(reply.get("output_ids") or []):
            raise RuntimeError(f"request {name}: SGLang answered {len(reply['output_ids'])} tokens with log-probs of {len(ids)} others")
        logprobs = [math.nan if pair[0] is None else float(pair[0]) for pair in pairs]
        if not all(map(math.isfinite, logprobs)):
            raise FloatingPointError(f"request {name}: the model's logits are not finite")
        start = len(flight.tokens)
        flight.tokens += ids
        self.tokens += len(ids)
        flight.logprobs += logprobs
        if count := flight.request.sampling.num_likeliest:
            flight.likeliest += _likeliest(meta.get("output_top_logprobs") or [], len(ids), count, name)
        for span in self._spans(flight, meta, len(ids)):
            _append_span(flight, VersionSpan(span.start + start, span.end + start, span.version))
        if not start:
            flight.cached = int(meta.get("cached_tokens") or 0)
        self._settle(flight, meta["finish_reason"], start)

    def _spans(self, flight: Flight, meta: dict[str, Any], count: int) -> list[VersionSpan]:
        if not count:
            return []
        if not self._tells_versions:
            return [VersionSpan(0, count, flight.version)]
        spans = [VersionSpan(span["start"], min(span["end"], count), int(span["version"])) for span in meta["weight_versions"]]
        if len(spans) > 1:  # a publish in place: what was cached by then stays, and is of the older weights
            begin = len(flight.tokens) - count
            flight.cache_spans.append(VersionSpan(begin + spans[1].start, begin + count, spans[0].version))
        return [span for span in spans if span.end > span.start]

    def _settle(self, flight: Flight, reason: dict[str, Any], start: int) -> None:
        """Whether the request is done, and why."""
        if self._ends_early(flight, start):
            flight.finish = FinishReason.STOP
        elif reason["type"] in REASONS:
            flight.finish = REASONS[reason["type"]]
        elif len(flight.tokens) >= flight.longest:
            flight.finish = FinishReason.LENGTH
        elif flight.cut or (flight.cut_if_begun and flight.tokens):
            flight.finish = FinishReason.ABORT
        elif self.open:
            raise RuntimeError(f"request {flight.request.request_id}: SGLang gave it up: {reason.get('message') or reason}")

    def _ends_early(self, flight: Flight, start: int) -> bool:
        """Ends that the server does not see: a stop string that began in an earlier part, stop ids beside ignore_eos."""
        sampling, tokens = flight.request.sampling, flight.tokens
        reach = max((len(stop.encode()) for stop in sampling.stop), default=0) if start else 0
        for end in range(start + 1, len(tokens) + 1):
            by_id = sampling.ignore_eos and tokens[end - 1] in flight.stop_ids
            by_text = end - start < reach and self._stopping.contains(tokens[max(0, end - reach - 4) : end], sampling.stop)
            if by_id or by_text:
                self._shorten(flight, end)
                return True
        return False

    @staticmethod
    def _shorten(flight: Flight, length: int) -> None:
        del flight.tokens[length:], flight.logprobs[length:], flight.likeliest[length:]
        for spans in (flight.spans, flight.cache_spans):
            spans[:] = [span._replace(end=min(span.end, length)) for span in spans if span.start < length]


def _likeliest(places: list[Any], tokens: int, count: int, name: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """From [[log-prob, id, text], ...] at each place."""
    rows = [(np.array([entry[1] for entry in place], np.int32), np.array([entry[0] for entry in place], np.float32)) for place in places]
    if len(rows) != tokens or any(len(ids) != count for ids, _ in rows):
        raise RuntimeError(f"request {name}: SGLang answered {tokens} tokens without the {count} likeliest at each place")
    return rows


def _append_span(flight: Flight, span: VersionSpan) -> None:
    if flight.spans and flight.spans[-1].version == span.version:
        flight.spans[-1] = flight.spans[-1]._replace(end=span.end)
    else:
        flight.spans.append(span)
