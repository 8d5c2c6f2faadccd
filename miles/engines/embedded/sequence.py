"""One request inside the engine: its tokens so far, and how much of it lies in the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from miles.types import Completion, FinishReason, GenerateRequest, Likeliest, VersionSpan

Reply = Callable[[Completion | None, BaseException | None], None]
"""Hands the end of one request to whoever sent it: a completion, or an error."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request and the tokens written for it. Its slot in the cache is its place in `Scheduler.running`.

    The next token can be sampled once all but none of `tokens` are cached: one missing token is a decode step, more are
    a prefill. A retracted sequence simply has `cached` 0 again.
    """

    request: GenerateRequest
    reply: Reply
    max_tokens: int  # prompt and response
    stop_ids: frozenset[int]
    tokens: list[int] = field(default_factory=list)  # prompt, then response
    logprobs: list[float] = field(default_factory=list)  # [response tokens]
    likeliest: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)  # [response tokens], where asked for
    spans: list[VersionSpan] = field(default_factory=list)
    finish: FinishReason | None = None
    failure: Exception | None = None  # why there can be no completion
    number: int = -1  # order of admission
    prompt_hash: int = 0
    cached: int = 0  # leading tokens whose keys and values lie in the slot
    stale: int = 0  # of these, the leading ones computed with older weights than the current
    stale_version: int = 0  # the oldest weights among theirs
    cache_spans: list[VersionSpan] = field(default_factory=list)  # response tokens that read stale ones
    reused: int = 0  # prompt tokens whose keys and values were copied from another slot

    def __post_init__(self) -> None:
        self.tokens = list(self.request.input_ids)
        self.prompt_hash = hash(tuple(self.tokens))

    @property
    def prompt_length(self) -> int:
        return len(self.request.input_ids)

    @property
    def done(self) -> bool:
        return self.finish is not None or self.failure is not None

    @property
    def num_written(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def missing(self) -> int:
        """Tokens whose keys and values must be computed before the next one can be sampled."""
        return len(self.tokens) - self.cached

    def append(self, token: int, logprob: float, version: int) -> None:
        extend_spans(self.spans, self.num_written, version)
        if self.stale:
            extend_spans(self.cache_spans, self.num_written, self.stale_version)
        self.tokens.append(token)
        self.logprobs.append(logprob)

    def weights_changed(self, from_version: int) -> None:
        """What is cached was computed with older weights from here on."""
        if not self.stale:
            self.stale_version = from_version
        self.stale = self.cached

    def forget_cache(self) -> None:
        self.cached = self.stale = 0

    def completion(self) -> Completion:
        assert self.finish is not None
        return Completion(
            request_id=self.request.request_id,
            token_ids=self.tokens[self.prompt_length :],
            logprobs=self.logprobs,
            finish_reason=self.finish,
            version_spans=self.spans,
            cached_tokens=self.reused,
            cache_spans=self.cache_spans,
            stale_cache_tokens=sum(span.end - span.start for span in self.cache_spans),
            likeliest=stacked(self.likeliest, self.request.sampling.num_likeliest),
        )


def stacked(rows: list[tuple[np.ndarray, np.ndarray]], count: int) -> Likeliest | None:
    """One row (ids, log-probs) for each token; None where none are asked for."""
    if not count:
        return None
    ids, logprobs = zip(*rows, strict=True) if rows else ((), ())
    return Likeliest(np.array(ids, np.int32).reshape(-1, count), np.array(logprobs, np.float32).reshape(-1, count))


def extend_spans(spans: list[VersionSpan], place: int, version: int) -> None:
    """Token `place` belongs to `version`: to the last span, or to a new one."""
    if spans and spans[-1].end == place and spans[-1].version == version:
        spans[-1] = spans[-1]._replace(end=place + 1)
    else:
        spans.append(VersionSpan(place, place + 1, version))


def shared_prefix(left: Sequence, right: Sequence) -> int:
    """Leading tokens that two sequences have in common, 0 when nothing says that they are related."""
    related = left.prompt_hash == right.prompt_hash or (left.request.affinity and left.request.affinity == right.request.affinity)
    return common_length(left.tokens, right.tokens) if related else 0


def common_length(left: list[int], right: list[int]) -> int:
    """Length of the common prefix, by halving: list comparison runs at the speed of C."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
