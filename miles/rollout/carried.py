"""What an attempt that was cut off leaves for the next one: stragglers go on from where they were, in another request.

Sampling a late answer anew would throw its tokens away, and would favour short answers, as those are never late. So what engines have
written is kept, with its log-probs and versions, and the next attempt asks for the rest only. A GenerateFn sees nothing of it: where it
asks the same again it gets the same answer, and the end of one that was not finished comes after what there was.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from miles.types import Completion, FinishReason, Likeliest, PromptGroup, Sample, SampleStatus, VersionSpan

HAND_OVER_SECONDS = 2.0
"""That engines get to give back what they have of a group whose time is over."""


class Aborts(Protocol):
    async def abort(self, request_ids: Iterable[str] | None = None) -> int: ...


@dataclass(slots=True)
class Carried:
    """Of one sample: what its turns have got so far, and the request that an engine is at."""

    turns: dict[int, tuple[list[int], Completion]] = field(default_factory=dict)  # turn -> what was asked, and the answer so far
    asking: str = ""
    answered: asyncio.Event = field(default_factory=asyncio.Event)  # nothing is being asked

    def so_far(self, turn: int, input_ids: list[int]) -> Completion | None:
        """What there is of this answer. Another question than before makes all that came after it worthless."""
        asked, completion = self.turns.get(turn, ([], None))
        if completion is not None and asked == input_ids:
            return completion
        self.turns = {earlier: entry for earlier, entry in self.turns.items() if earlier < turn}
        return None

    def note(self, turn: int, input_ids: list[int], completion: Completion) -> None:
        self.turns[turn] = list(input_ids), copy(completion)

    @property
    def tokens(self) -> int:
        return sum(len(completion.token_ids) for _, completion in self.turns.values())


def copy(completion: Completion) -> Completion:
    """Whoever gets a completion may change it."""
    return replace(completion, token_ids=list(completion.token_ids), logprobs=list(completion.logprobs))


def joined(first: Completion | None, rest: Completion) -> Completion:
    """One answer of two requests, the second of which began where the first was cut off."""
    if first is None:
        return rest
    start = len(first.token_ids)
    return replace(
        rest,
        token_ids=first.token_ids + rest.token_ids,
        logprobs=first.logprobs + rest.logprobs,
        version_spans=first.version_spans + shifted(rest.version_spans, start),
        cache_spans=first.cache_spans + shifted(rest.cache_spans, start),
        cached_tokens=first.cached_tokens,
        stale_cache_tokens=first.stale_cache_tokens + rest.stale_cache_tokens,
        likeliest=None if rest.likeliest is None else joined_likeliest(first.likeliest, rest.likeliest),
    )


def joined_likeliest(first: Likeliest | None, rest: Likeliest) -> Likeliest:
    if first is None:
        return rest
    return Likeliest(np.concatenate([first.ids, rest.ids]), np.concatenate([first.logprobs, rest.logprobs]))


def shifted(spans: list[VersionSpan], by: int) -> list[VersionSpan]:
    return [VersionSpan(span[0] + by, span[1] + by, span[2]) for span in spans] if by else spans


def is_finished(completion: Completion) -> bool:
    return completion.finish_reason is not FinishReason.ABORT


async def hand_over(router: Aborts, carried: Sequence[Carried]) -> None:
    """Cut off what engines are at, and wait until its tokens are noted; engines that do not answer are not waited for."""
    asked = [one for one in carried if one.asking]
    if not asked:
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HAND_OVER_SECONDS):
            await router.abort([one.asking for one in asked])
            await asyncio.gather(*(one.answered.wait() for one in asked))


def going_on(group: PromptGroup, done: Sequence[int]) -> PromptGroup:
    """The same draw for its next attempt: what is done stays, the others are empty.

    Args:
        done: places of samples that are generated and scored.
    """
    kept = set(done)
    samples = [sample if place in kept else emptied(sample) for place, sample in enumerate(group.samples)]
    return replace(group, attempt=group.attempt + 1, samples=samples)


def emptied(sample: Sample) -> Sample:
    return Sample(
        sample_index=sample.sample_index,
        group_index=sample.group_index,
        prompt=sample.prompt,
        prompt_ids=sample.prompt_ids,
        label=sample.label,
        metadata=sample.metadata,
        tools=sample.tools,
        data_set=sample.data_set,
    )


def is_open(sample: Sample) -> bool:
    return sample.status is SampleStatus.PENDING
