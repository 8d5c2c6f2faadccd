"""What a rollout function gets to work with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from miles.config.run_config import RunConfig
from miles.protocols import DataSource, GenerateFn
from miles.rewards.reward import RewardScorer
from miles.rollout.verdicts import Verdicts
from miles.tracking.ledger import Ledger
from miles.types import Completion, GenerateRequest, Sample, SamplingParams


class RequestRouter(Protocol):
    """Sends requests to the engines; requests of one affinity go to one engine, and those of a wave to `engine_index`."""

    async def generate(self, request: GenerateRequest, engine_index: int | None = None) -> Completion: ...

    async def abort(self, request_ids: Iterable[str] | None = None) -> int:
        """Cuts requests off: what there is of them is answered, finish_reason abort."""
        ...

    async def ready(self) -> None:
        """Waits until there is an engine that could serve; raises once that takes too long."""
        ...

    def engine_for(self, position: int) -> int: ...


class NotConnected:
    """The router before there are engines."""

    async def generate(self, request: GenerateRequest, engine_index: int | None = None) -> Completion:
        raise AssertionError("init(engines) comes first")

    async def abort(self, request_ids: Iterable[str] | None = None) -> int:
        raise AssertionError("init(engines) comes first")

    async def ready(self) -> None:
        raise AssertionError("init(engines) comes first")

    def engine_for(self, position: int) -> int:
        raise AssertionError("init(engines) comes first")


class WaveStats(Protocol):
    """What a wave under way can tell."""

    def stats(self) -> dict[str, int]: ...


class Teacher(Protocol):
    """Says what a served teacher thinks of a sample's tokens."""

    async def score(self, sample: Sample) -> None: ...


@dataclass(slots=True)
class RolloutContext:
    """Everything a rollout function needs; made once by the executor. A function of your own gets it as well."""

    args: RunConfig
    data: DataSource
    tokenizer: Any
    scorer: RewardScorer
    ledger: Ledger
    generate: GenerateFn
    sampling: SamplingParams
    seed: int  # of the run, or of an evaluation set
    verdicts: Verdicts
    num_rollout: int  # of the whole run
    group_limit: float | None  # seconds for one attempt at a group; None: whoever asks for it has a limit of its own
    router: RequestRouter = field(default_factory=NotConnected)
    num_engines: int = 0
    weight_version: int = 0  # of the last publish
    tables: dict[str, WaveStats] = field(default_factory=dict)  # waves under way, for reports of stalls
    teacher: Teacher | None = None  # with teacher_urls, for training samples
    at_rest: Callable[[], None] = lambda: None  # see `saves.KeepsState`


def train_sampling(args: RunConfig) -> SamplingParams:
    """How training samples are drawn."""
    return SamplingParams(
        max_new_tokens=args.max_response_length,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        stop=tuple(args.stop),
        stop_token_ids=tuple(args.stop_token_ids),
        ignore_eos=args.ignore_eos,
        num_likeliest=args.score_centering,
    )


def eval_sampling(args: RunConfig) -> SamplingParams:
    """How evaluation samples are drawn: greedy at temperature 0, else untruncated but for eval_top_p."""
    return SamplingParams(
        max_new_tokens=args.eval_max_response_length or args.max_response_length,
        temperature=args.eval_temperature,
        top_p=args.eval_top_p,
        stop=tuple(args.stop),
        stop_token_ids=tuple(args.stop_token_ids),
    )


def used_up(context: RolloutContext, rollout_id: int, kept: int) -> RuntimeError:
    """The end of the data before the end of the run, with the numbers that say why."""
    args, rows = context.args, context.data.rows()
    drawn = context.data.state().get("next_group_index", "all")
    return RuntimeError(
        f"the data is used up: {drawn} prompts were drawn, which is --num-epoch {args.num_epoch} times {rows} rows, and "
        f"rollout {rollout_id} of {context.num_rollout} has only {kept} of its {args.rollout_batch_size} groups; "
        "give more epochs or fewer rollouts"
    )
