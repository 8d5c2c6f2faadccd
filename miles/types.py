"""What flows through the house: the carriers, each field with its meaning, shape and unit.

The life of a prompt group, one name per state::

    PromptGroup (siblings, empty) -> the same Samples filled -> scored -> RolloutData (columns)
    -> TrainShare (one data-parallel rank's part) -> RolloutDataRef (what the driver holds)

Every per-token list is aligned with the tokens it speaks of: `logprobs[i]` is the log-probability of
`token_ids[i]` given everything before it. A weight version is a number that only grows: 0 is the
checkpoint that an engine loaded itself, 1 the first publish.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple

import numpy as np

Message = dict[str, Any]
"""One chat message: {"role": ..., "content": text or a list of parts, ...}."""

PauseMode = Literal["retract", "in_place", "abort"]
Role = Literal["actor", "critic"]


class VersionSpan(NamedTuple):
    """Tokens `[start, end)` of a response were sampled under weights `version`."""

    start: int
    end: int
    version: int


class SampleStatus(StrEnum):
    PENDING = "pending"  # nothing generated yet, or only a part of it
    COMPLETED = "completed"  # ended by a stop token, a stop string, or the environment
    TRUNCATED = "truncated"  # ended by the length limit
    ABORTED = "aborted"  # cut off by an abort; the partial tokens are kept
    FAILED = "failed"  # generation or scoring failed; `error` says why


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one completion is sampled. Log-probs are always those of softmax(logits / temperature), before any truncation."""

    max_new_tokens: int
    temperature: float = 1.0  # 0 is greedy; log-probs are then those at temperature 1
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0  # the same seed and weights give the same tokens, whatever else is in the batch
    num_likeliest: int = 0  # also tell the log-probs of so many likeliest tokens at each place


@dataclass(frozen=True, slots=True)
class Wave:
    """A set of requests that an engine runs as one: it starts when all `size` have arrived and admits them by `order`.

    So the batches it forms, and with them every bit of its results, do not depend on when each request came.
    Waves run one after another. Requests without a wave are admitted as they come.
    """

    wave_id: str
    size: int  # requests of this wave on this engine
    order: int  # place of this request, 0 .. size - 1


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One completion asked of an engine."""

    request_id: str  # unique, and no prefix of another
    input_ids: list[int]
    sampling: SamplingParams
    affinity: str = ""  # requests of one affinity (siblings of a group, turns of a session) stay on one engine
    wave: Wave | None = None


@dataclass(slots=True)
class Likeliest:
    """The likeliest tokens at each place of a response, under the distribution that its token was drawn from."""

    ids: np.ndarray  # int32 [tokens, num_likeliest]
    logprobs: np.ndarray  # float32 [tokens, num_likeliest] 0.0 where the policy did not write


@dataclass(slots=True)
class Completion:
    """What an engine wrote. `token_ids` includes the stop token that ended it.

    Example: Completion("g7-s1", token_ids=[19, 2], logprobs=[-0.1, -0.01], finish_reason=STOP, version_spans=[(0, 2, 3)]).
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[float]  # [tokens]
    finish_reason: FinishReason
    version_spans: list[VersionSpan]  # cover [0, tokens)
    cached_tokens: int = 0  # prompt tokens whose KV came from a cache
    stale_cache_tokens: int = 0  # tokens that read KV older than the weights that they were sampled with (pause mode in_place)
    cache_spans: list[VersionSpan] = field(default_factory=list)  # these tokens, and the oldest version in the cache that each read
    engine: int = -1  # index of the engine; the router notes it
    likeliest: Likeliest | None = None  # where num_likeliest asks for it


@dataclass(slots=True)
class Sample:
    """One attempt at one prompt: a trajectory of one or more turns, as it is trained.

    Example: prompt_ids [5, 6], response_ids [19, 2], loss_mask [1, 1], rollout_logprobs [-0.1, -0.01], reward 1.0.
    """

    sample_index: int  # group_index * n_samples_per_prompt + place among its siblings
    group_index: int
    prompt: str | list[Message]
    prompt_ids: list[int]
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None
    data_set: str = ""  # its group's

    response_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)  # [response tokens] 1: written by the policy, and trained
    rollout_logprobs: list[float] = field(default_factory=list)  # [response tokens] 0.0 where loss_mask is 0
    version_spans: list[VersionSpan] = field(default_factory=list)  # offsets into response_ids
    likeliest: Likeliest | None = field(default=None, compare=False)  # aligned with response_ids; with score_centering
    teacher_logprobs: list[float] | None = None  # [response tokens]; with teacher_urls
    response: str = ""  # response_ids decoded, special tokens left out

    status: SampleStatus = SampleStatus.PENDING
    reward: float | None = None  # None: not scored, or unscorable; never trained then
    reward_details: dict[str, float] = field(default_factory=dict)  # parts of the reward, for metrics
    error: str | None = None
    cached_tokens: int = 0
    cache_spans: list[VersionSpan] = field(default_factory=list)  # response tokens that read a KV cache older than their weights
    stale_cache_tokens: int = 0  # how many these are

    @property
    def oldest_version(self) -> int:
        return min((span.version for span in self.version_spans), default=-1)

    @property
    def newest_version(self) -> int:
        return max((span.version for span in self.version_spans), default=-1)


@dataclass(slots=True)
class GroupTimes:
    """When a group passed where: seconds of the wall clock, 0 where it has not. Of siblings, when the last one did."""

    started: float = 0.0  # its first attempt
    generated: float = 0.0
    scored: float = 0.0
    engine: int = -1  # index of the engine that answered


@dataclass(slots=True)
class PromptGroup:
    """The siblings of one draw of one prompt.

    `group_index` counts draws over the whole run and alone decides the rest: epoch = group_index // rows, and the row
    comes from that epoch's order. So a data source is saved and resumed as one number and a short list.
    """

    group_index: int
    prompt_index: int  # row in the data set, after filtering
    epoch: int
    samples: list[Sample]
    attempt: int = 0  # how often this draw was started again
    data_set: str = ""  # its name, where several are mixed or evaluated
    times: GroupTimes = field(default_factory=GroupTimes, compare=False)

    @property
    def oldest_version(self) -> int:
        return min((sample.oldest_version for sample in self.samples if sample.response_ids), default=-1)


@dataclass(slots=True)
class RolloutOutput:
    """What a rollout function hands to the executor for one rollout: whole groups in training order, and its metrics."""

    groups: list[PromptGroup]
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class RolloutData:
    """Samples as columns. Token columns hold the samples one after another, prompt and response, cut by `offsets`."""

    token_ids: np.ndarray  # int32 [tokens]
    loss_mask: np.ndarray  # uint8 [tokens] 0 on prompts
    rollout_logprobs: np.ndarray  # float32 [tokens] 0 where loss_mask is 0
    weight_versions: np.ndarray  # int32 [tokens] -1 where loss_mask is 0
    offsets: np.ndarray  # int64 [samples + 1]
    prompt_lengths: np.ndarray  # int32 [samples]
    rewards: np.ndarray  # float32 [samples] NaN: unscored
    group_indices: np.ndarray  # int64 [samples]
    sample_indices: np.ndarray  # int64 [samples]
    likeliest: Likeliest | None = None  # rows for all tokens; with score_centering
    teacher_logprobs: np.ndarray | None = None  # float32 [tokens] 0 on prompts; with teacher_urls

    @property
    def num_samples(self) -> int:
        return len(self.rewards)


@dataclass(slots=True)
class BatchColumns:
    """The few numbers of every sample of the batch that each rank needs for group baselines and exact normalisation."""

    rewards: np.ndarray  # float32 [batch samples] NaN: unscored
    group_indices: np.ndarray  # int64 [batch samples]
    num_trained_tokens: np.ndarray  # int64 [batch samples] sum of the loss mask; 0 where unscored
    step_of: np.ndarray  # int32 [batch samples] the optimizer step, 0 .. num_steps - 1, that trains it


@dataclass(slots=True)
class TrainShare:
    """One data-parallel rank's part of a rollout."""

    rollout_id: int
    data: RolloutData  # this rank's samples, ordered by optimizer step
    positions: np.ndarray  # int64 [own samples] place of each in the batch columns
    batch: BatchColumns
    num_steps: int
    weight_version: int  # the engines' version when the batch was drained, for staleness metrics


class ObjectRef(NamedTuple):
    """Names one stored object. `handle` keeps it alive where the store counts references (a Ray ObjectRef)."""

    key: str
    handle: Any = None


@dataclass(slots=True)
class RolloutDataRef:
    """What the driver carries: where each rank's share lies. Free it through the store after every consumer is done."""

    rollout_id: int
    shares: list[ObjectRef]  # [data-parallel size]
    num_samples: int
    metrics: dict[str, float]
    group_indices: list[int]
    times: list[GroupTimes] = field(default_factory=list)  # of each group, in the same order
    ready: float = 0.0  # when the last group was there and the batch could be cut: seconds of the wall clock


@dataclass(slots=True)
class TrainOutputRef:
    """The critic's values: one float32 array [own tokens] per data-parallel rank, in the order of that rank's share."""

    rollout_id: int
    shares: list[ObjectRef]


@dataclass(slots=True)
class TrainResult:
    """What one rank returns from training on its share. Only rank 0's metrics are logged; they are global."""

    metrics_per_step: list[dict[str, float]]
    step: int  # optimizer steps done over the whole run
    seconds: float
    values: ObjectRef | None = None  # critic: its values of this share, from before its update


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor on the wire. `name` is its Hugging Face state-dict name."""

    name: str
    dtype: str  # "float32", "bfloat16", ...
    shape: tuple[int, ...]
    offset: int  # bytes from the start of its bucket, 16-aligned
    nbytes: int


@dataclass(frozen=True, slots=True)
class PublishPlan:
    """One publish of weights: the buckets, their order, and how they travel. Equal on both ends."""

    version: int
    transport: str
    buckets: tuple[tuple[TensorSpec, ...], ...]
    bucket_nbytes: tuple[int, ...]
    channel: dict[str, Any]  # the transport's own address: segment names, a TCP address, a directory
    checksum: str  # name of the checksum both ends compute, "" when verification is off
    staged: bool = False  # every bucket lies ready before the engines pause, and they take all of them at once

    @property
    def concurrent(self) -> bool:
        """Whether a bucket is sent and received in one movement (a collective) rather than one after the other."""
        return self.transport == "broadcast"


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """`stuck_seconds`: how long nothing has come of what the engine is at (its last token's age while requests run); 0 when paused.

    Tokens are counted from the engine's start: all that came, and those of requests that were aborted or failed.
    """

    healthy: bool
    weight_version: int
    running: int
    waiting: int
    paused: bool
    stuck_seconds: float = 0.0
    reason: str = ""
    tokens: int = 0
    tokens_cut: int = 0


@dataclass(slots=True)
class EvalResult:
    """Metrics of one evaluation at one weight version; `reason` says why a set has none."""

    rollout_id: int
    weight_version: int
    metrics: dict[str, float]
    reason: str | None = None
