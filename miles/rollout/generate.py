"""From one empty sample to a filled one: the call to the engine, the check of what came back, and single_turn."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from miles.data.seeds import sample_seed
from miles.plugins import load
from miles.protocols import GenerateCall, GenerateFn
from miles.rollout.carried import Carried, copy, is_finished, joined, joined_likeliest, shifted
from miles.rollout.context import RolloutContext
from miles.types import Completion, FinishReason, GenerateRequest, GroupTimes, Likeliest, Sample, SampleStatus, SamplingParams

BUILTIN = {"single_turn": "miles.rollout.generate.single_turn", "multi_turn": "miles.rollout.multi_turn.MultiTurn"}
STATUS = {
    FinishReason.STOP: SampleStatus.COMPLETED,
    FinishReason.LENGTH: SampleStatus.TRUNCATED,
    FinishReason.ABORT: SampleStatus.ABORTED,
}
Send = Callable[[GenerateRequest], Awaitable[Completion]]


class PromptRefused(Exception):
    """The engine says that this request can never work; another attempt would be refused as well."""


class EngineFailed(Exception):
    """The engine failed, was lost, or answered something that cannot be trained; another attempt may work."""


async def single_turn(sample: Sample, generate: GenerateCall) -> None:
    """One completion of the prompt."""
    completion = await generate(sample.prompt_ids)
    append_completion(sample, completion)
    sample.status = STATUS[completion.finish_reason]


@dataclass(frozen=True, slots=True)
class EngineCall:
    """A sample's own `generate`: knows its seed, sampling settings and engine.

    Raises PromptRefused, EngineFailed, or whatever else the engine raised.
    """

    name: str  # of the sample: group, attempt, place
    place: int  # among its siblings
    sampling: SamplingParams
    seed_key: tuple[int, int, int, int]  # the run's seed, group_index, place among siblings, attempt
    max_context: int
    send: Send
    times: GroupTimes = field(default_factory=GroupTimes)  # of its group
    carried: Carried = field(default_factory=Carried)

    async def __call__(self, input_ids: list[int], *, turn: int = 0, max_new_tokens: int | None = None) -> Completion:
        room = max(self.max_context - len(input_ids), 1)  # an over-long prompt is for the engine to refuse
        limit = min(max_new_tokens or self.sampling.max_new_tokens, room)
        before = self.carried.so_far(turn, input_ids)
        if before is not None and is_finished(before):
            return copy(before)
        written = [] if before is None else before.token_ids
        sampling = replace(self.sampling, max_new_tokens=limit - len(written), seed=sample_seed(*self.seed_key, turn))
        # The dot ends the id: without it that of turn 1 were a prefix of turn 10's.
        request = GenerateRequest(f"{self.name}.{turn}.", input_ids + written, sampling, affinity=self.name.rpartition(".")[0])
        completion = joined(before, await self._answer(request))
        check_completion(completion, sampling.num_likeliest)
        if is_finished(completion) or not self.sampling.stop:  # a stop string may lie across the cut, and no engine would see it
            self.carried.note(turn, input_ids, completion)
        if not is_finished(completion):
            raise EngineFailed(f"the request was aborted after {len(completion.token_ids)} tokens")
        self.times.engine = completion.engine
        return completion

    async def _answer(self, request: GenerateRequest) -> Completion:
        self.carried.asking = request.request_id
        self.carried.answered.clear()
        try:
            return await self.send(request)
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise EngineFailed("the engine gave the request up") from None  # cancelled over there, not here
        except ValueError as error:
            raise PromptRefused(f"{type(error).__name__}: {error}") from error
        except (OSError, RuntimeError) as error:
            raise EngineFailed(f"{type(error).__name__}: {error}") from error
        finally:
            self.carried.asking = ""
            self.carried.answered.set()


def check_completion(completion: Completion, num_likeliest: int = 0) -> None:
    """One log-prob per token and versions that cover them all, or EngineFailed: never a shifted pairing."""
    tokens = len(completion.token_ids)
    told = (0, 0) if completion.likeliest is None else completion.likeliest.logprobs.shape
    if num_likeliest and told != (tokens, num_likeliest):
        raise EngineFailed(
            f"engine told {told} likeliest log-probs for {tokens} tokens of {completion.request_id}, not {num_likeliest} for each"
        )
    if len(completion.logprobs) != tokens:
        raise EngineFailed(f"engine answered {tokens} tokens with {len(completion.logprobs)} log-probs for {completion.request_id}")
    end = 0
    for start, stop, _ in completion.version_spans:
        if start != end or stop < start:
            end = -1
            break
        end = stop
    if end != tokens:
        raise EngineFailed(f"engine's version spans {completion.version_spans} do not cover {tokens} tokens of {completion.request_id}")


def append_completion(sample: Sample, completion: Completion) -> None:
    """The policy's own tokens: trained, with the log-probs and versions that the engine gave."""
    start = len(sample.response_ids)
    sample.response_ids += completion.token_ids
    sample.loss_mask += [1] * len(completion.token_ids)
    sample.rollout_logprobs += completion.logprobs
    sample.version_spans += shifted(completion.version_spans, start)
    sample.cache_spans += shifted(completion.cache_spans, start)
    if completion.likeliest is not None:
        sample.likeliest = joined_likeliest(sample.likeliest, completion.likeliest)
    sample.cached_tokens += completion.cached_tokens
    sample.stale_cache_tokens += completion.stale_cache_tokens


def append_environment(sample: Sample, token_ids: list[int]) -> None:
    """Tokens that the environment wrote: in the context, not trained, under no version."""
    sample.response_ids += token_ids
    sample.loss_mask += [0] * len(token_ids)
    sample.rollout_logprobs += [0.0] * len(token_ids)
    if sample.likeliest is not None:
        shape = (len(token_ids), sample.likeliest.ids.shape[1])
        sample.likeliest = joined_likeliest(sample.likeliest, Likeliest(np.zeros(shape, np.int32), np.zeros(shape, np.float32)))


def response_text(tokenizer: Any, token_ids: list[int]) -> str:
    """The text without special tokens. Fast tokenizers are asked directly: the wrapper looks at every id on the way in."""
    if tokenizer.is_fast and not tokenizer.clean_up_tokenization_spaces:
        return str(tokenizer.backend_tokenizer.decode(token_ids, skip_special_tokens=True))
    return str(tokenizer.decode(token_ids, skip_special_tokens=True))


def load_generate(name: str) -> Callable[..., object]:
    """What `generate_function` names: a GenerateFn, or a class that is built once with the context."""
    found: Callable[..., object] = load(name, BUILTIN, setting="--generate-function")
    return found


def build_generate(found: Callable[..., object], context: RolloutContext) -> GenerateFn:
    return found(context) if isinstance(found, type) else found  # type: ignore[return-value]
