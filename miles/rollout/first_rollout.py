"""--verify-first-step on the rollout side: what is trained is what the engines wrote, as they were asked, and gold answers score 1."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from miles.config.run_config import RunConfig
from miles.protocols import FirstStepWrong
from miles.rewards.reward import RewardScorer
from miles.rollout.context import RequestRouter
from miles.types import Completion, GenerateRequest, PromptGroup, Sample, SampleStatus

BY_RULE = ("math", "gsm8k", "dapo", "multiple_choice", "exact", "last_number", "f1")
"""Built-in rewards that the label itself must satisfy."""
GOLD_FORMS = ("{}", "\\boxed{{{}}}", "The answer is {}.", "#### {}", "Answer: {}")
MAX_GOLD = 16

Exchange = tuple[GenerateRequest, Completion]
Key = tuple[int, int, int]
"""Group, attempt, place among the siblings."""


class WatchedRouter:
    """A router that remembers what was asked and answered, until it is told to stop."""

    def __init__(self, router: RequestRouter) -> None:
        self._router = router
        self._exchanges: dict[Key, list[Exchange]] | None = defaultdict(list)

    async def generate(self, request: GenerateRequest, engine_index: int | None = None) -> Completion:
        completion = await self._router.generate(request, engine_index)
        if self._exchanges is not None:
            group, attempt, place, _ = request.request_id.rpartition("-g")[2].split(".", 3)
            # a copy: whoever gets the completion may change it
            own = replace(completion, token_ids=list(completion.token_ids), logprobs=list(completion.logprobs))
            self._exchanges[int(group), int(attempt), int(place)].append((request, own))
        return completion

    async def abort(self, request_ids: Iterable[str] | None = None) -> int:
        return await self._router.abort(request_ids)

    async def ready(self) -> None:
        await self._router.ready()

    def engine_for(self, position: int) -> int:
        return self._router.engine_for(position)

    def stop(self) -> dict[Key, list[Exchange]]:
        """What was remembered; nothing is from here on."""
        found, self._exchanges = self._exchanges or {}, None
        return found


def check_exchanges(groups: Sequence[PromptGroup], exchanges: dict[Key, list[Exchange]], args: RunConfig) -> dict[str, float]:
    """Returns metrics.

    Raises:
        FirstStepWrong: sampling filter or tokenisation, with the sample and the first token that is off.
    """
    tokens = 0
    for group in groups:
        for place, sample in enumerate(group.samples):
            # earlier attempts too: a straggler goes on with what they wrote
            own = [one for attempt in range(group.attempt + 1) for one in exchanges.get((group.group_index, attempt, place), [])]
            for request, _ in own:
                _check_sampling(request, sample, args)
            tokens += _check_tokens(sample, own)
    return {"verify/tokens_as_written": float(tokens)}


def _check_sampling(request: GenerateRequest, sample: Sample, args: RunConfig) -> None:
    sampling = request.sampling
    wanted = {"temperature": args.temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    for name, value in wanted.items():
        if (asked := getattr(sampling, name)) != value:
            raise FirstStepWrong(
                "sampling filter",
                f"sample {sample.sample_index} was asked for with {name} {asked:g}, the trainer's log-probs are those of {value:g}",
            )


def _check_tokens(sample: Sample, exchanges: Sequence[Exchange]) -> int:
    """Every trained token of a sample was written by an engine at that place, after exactly these ids. Returns how many."""
    ids = sample.prompt_ids + sample.response_ids
    first = len(sample.prompt_ids)
    written: dict[int, tuple[int, float]] = {}
    for request, completion in exchanges:
        start = len(request.input_ids)
        if ids[:start] == request.input_ids:
            written |= {start + i: pair for i, pair in enumerate(zip(completion.token_ids, completion.logprobs, strict=True))}
    count = 0
    for i, trained in enumerate(sample.loss_mask):
        if not trained:
            continue
        count += 1
        pair = (sample.response_ids[i], sample.rollout_logprobs[i])
        if written.get(first + i) != pair:
            raise FirstStepWrong("tokenisation", _how_token_differs(sample, i, written.get(first + i), exchanges))
    return count


def _how_token_differs(sample: Sample, i: int, written: tuple[int, float] | None, exchanges: Sequence[Exchange]) -> str:
    what = f"trained token {i} of sample {sample.sample_index} has id {sample.response_ids[i]}, log-prob {sample.rollout_logprobs[i]:g}"
    if written is not None:
        return f"{what}; the engine wrote id {written[0]}, log-prob {written[1]:g} there"
    ids = sample.prompt_ids + sample.response_ids
    for turn, (request, _) in enumerate(exchanges):
        off = next((k for k, (a, b) in enumerate(zip(request.input_ids, ids, strict=False)) if a != b), None)
        if off is not None:
            return f"{what}; request {turn} was sent id {request.input_ids[off]} at place {off} where {ids[off]} is trained on"
    return f"{what}; no engine wrote a token there"


async def check_gold(groups: Sequence[PromptGroup], scorer: RewardScorer, args: RunConfig) -> dict[str, float]:
    """Score labels as if they were answers. Nothing is checked where there are none, or the reward is no rule of ours.

    Raises:
        FirstStepWrong: reward, with the label that scores less than 1.
    """
    if args.reward not in BY_RULE:
        return {}
    samples = [group.samples[0] for group in groups if group.samples[0].label is not None][:MAX_GOLD]
    for sample in samples:
        label = sample.label[0] if isinstance(sample.label, list) and sample.label else sample.label
        scores = [await _score(sample, form.format(label), scorer) for form in GOLD_FORMS]
        best = max((score for score in scores if score is not None), default=None)
        if best is None or best < 1.0:
            given = "no score" if best is None else f"{best:g}"
            raise FirstStepWrong(
                "reward", f"--reward {args.reward} gives the label {label!r} of prompt {sample.group_index} itself {given}, not 1"
            )
    return {"verify/gold_answers": float(len(samples))} if samples else {}


async def _score(sample: Sample, answer: str, scorer: RewardScorer) -> float | None:
    copy = replace(sample, response=answer, status=SampleStatus.COMPLETED, reward=None, reward_details={})
    await scorer.score(copy)
    return copy.reward
