"""One request to an SGLang server: what it is asked for, part by part, and what comes back."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from miles.engines.embedded.sequence import stacked
from miles.engines.embedded.stopping import Stopping
from miles.types import Completion, FinishReason, GenerateRequest, VersionSpan

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

    def payload(self, *, seeded: bool, cache_key: str) -> dict[str, Any]:
        """What the server is asked for: the rest of the response. Prefixes are shared only under an equal `cache_key`."""
        sampling = self.request.sampling
        params: dict[str, Any] = {
            "max_new_tokens": self.longest - len(self.tokens),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": min(sampling.top_k or ALL_TOKENS, ALL_TOKENS),
            "min_p": sampling.min_p,
            "ignore_eos": sampling.ignore_eos,
            "stop_token_ids": sorted(self.stop_ids),
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        }
        if sampling.stop:
            params["stop"] = list(sampling.stop)
        if seeded:
            params["sampling_seed"] = sampling.seed & SEED_BITS
        return {
            "rid": self.running,
            "input_ids": self.request.input_ids + self.tokens,
            "sampling_params": params,
            "return_logprob": True,
            "top_logprobs_num": sampling.num_likeliest,
            "extra_key": cache_key,
        }

    def add(self, reply: dict[str, Any], stopping: Stopping, *, tells_versions: bool, is_open: bool) -> int:
        """Take over what the server wrote, and find out whether that is the end. Returns the number of tokens.

        Args:
            tells_versions: whether the server tells which tokens are of which version; else all are of the one the part was sent under.
            is_open: whether nobody wants requests ended now, so that one that the server gave up is a fault.

        Raises:
            RuntimeError: the answer contradicts itself, or the server gave the request up.
            FloatingPointError: a log-prob is not finite.
        """
        meta, name = reply["meta_info"], self.request.request_id
        pairs = meta.get("output_token_logprobs") or []
        ids = [pair[1] for pair in pairs]
        if ids != list(reply.get("output_ids") or []):
            raise RuntimeError(f"request {name}: SGLang answered {len(reply['output_ids'])} tokens with log-probs of {len(ids)} others")
        logprobs = [math.nan if pair[0] is None else float(pair[0]) for pair in pairs]
        if not all(map(math.isfinite, logprobs)):
            raise FloatingPointError(f"request {name}: the model's logits are not finite")
        start = len(self.tokens)
        self.tokens += ids
        self.logprobs += logprobs
        if count := self.request.sampling.num_likeliest:
            self.likeliest += _likeliest(meta.get("output_top_logprobs") or [], len(ids), count, name)
        for span in self._spans_of(meta, len(ids), tells_versions):
            self._append_span(VersionSpan(span.start + start, span.end + start, span.version))
        if not start:
            self.cached = int(meta.get("cached_tokens") or 0)
        self._settle(meta["finish_reason"], start, stopping, is_open)
        return len(ids)

    def _spans_of(self, meta: dict[str, Any], count: int, tells_versions: bool) -> list[VersionSpan]:
        if not count:
            return []
        if not tells_versions:
            return [VersionSpan(0, count, self.version)]
        spans = [VersionSpan(span["start"], min(span["end"], count), int(span["version"])) for span in meta["weight_versions"]]
        if len(spans) > 1:  # a publish in place: what was cached by then stays, and is of the older weights
            begin = len(self.tokens) - count
            self.cache_spans.append(VersionSpan(begin + spans[1].start, begin + count, spans[0].version))
        return [span for span in spans if span.end > span.start]

    def _settle(self, reason: dict[str, Any], start: int, stopping: Stopping, is_open: bool) -> None:
        """Whether the request is done, and why."""
        if self._ends_early(start, stopping):
            self.finish = FinishReason.STOP
        elif reason["type"] in REASONS:
            self.finish = REASONS[reason["type"]]
        elif len(self.tokens) >= self.longest:
            self.finish = FinishReason.LENGTH
        elif self.cut or (self.cut_if_begun and self.tokens):
            self.finish = FinishReason.ABORT
        elif is_open:
            raise RuntimeError(f"request {self.request.request_id}: SGLang gave it up: {reason.get('message') or reason}")

    def _ends_early(self, start: int, stopping: Stopping) -> bool:
        """Ends that the server does not see: a stop string that began in an earlier part, stop ids beside ignore_eos."""
        sampling, tokens = self.request.sampling, self.tokens
        reach = max((len(stop.encode()) for stop in sampling.stop), default=0) if start else 0
        for end in range(start + 1, len(tokens) + 1):
            by_id = sampling.ignore_eos and tokens[end - 1] in self.stop_ids
            by_text = end - start < reach and stopping.contains(tokens[max(0, end - reach - 4) : end], sampling.stop)
            if by_id or by_text:
                self._shorten(end)
                return True
        return False

    def _shorten(self, length: int) -> None:
        del self.tokens[length:], self.logprobs[length:], self.likeliest[length:]
        for spans in (self.spans, self.cache_spans):
            spans[:] = [span._replace(end=min(span.end, length)) for span in spans if span.start < length]

    def _append_span(self, span: VersionSpan) -> None:
        if self.spans and self.spans[-1].version == span.version:
            self.spans[-1] = self.spans[-1]._replace(end=span.end)
        else:
            self.spans.append(span)


def _likeliest(places: list[Any], tokens: int, count: int, name: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """From [[log-prob, id, text], ...] at each place."""
    rows = [(np.array([entry[1] for entry in place], np.int32), np.array([entry[0] for entry in place], np.float32)) for place in places]
    if len(rows) != tokens or any(len(ids) != count for ids, _ in rows):
        raise RuntimeError(f"request {name}: SGLang answered {tokens} tokens without the {count} likeliest at each place")
    return rows
