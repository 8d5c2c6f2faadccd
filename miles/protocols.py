"""The sockets: what a plug must do, and when each method is called."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

import numpy as np

from miles.types import (
    Completion,
    EngineHealth,
    GenerateRequest,
    ObjectRef,
    PauseMode,
    PromptGroup,
    PublishPlan,
    RolloutOutput,
    Sample,
)


class DataSource(Protocol):
    """Where prompts come from. Lives in the executor; every call is made from its event loop."""

    def take(self) -> PromptGroup | None:
        """Called for each group to start. None: the epochs asked for are used up."""
        ...

    def give_back(self, group: PromptGroup) -> None:
        """Called when a taken draw must be started again (stale, engine lost, resumed): it is the next one taken."""
        ...

    def note_scored(self, group: PromptGroup) -> None:
        """Called with every scored group, before the group filter sees it; a source may learn from its rewards what comes next."""
        ...

    def rows(self) -> int:
        """Called once at start: prompts per epoch, after filtering."""
        ...

    def state(self) -> dict[str, Any]:
        """Called right after a rollout's last group was taken: the cursor, as JSON values."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Called once at resume, before the first take."""
        ...


class RolloutFn(Protocol):
    """Makes the groups of one rollout. Constructed once per run with (args, context: RolloutContext)."""

    def __call__(self, rollout_id: int) -> Awaitable[RolloutOutput]:
        """Called once per rollout id, in order, by `RolloutExecutor.get`."""
        ...

    def set_weight_version(self, version: int) -> None:
        """Called after every publish, before the next `__call__` that must see it."""
        ...

    def untrained(self, trained_through: int) -> Sequence[int]:
        """Called at a save: group indices taken but not in any rollout <= trained_through, oldest first."""
        ...

    def dispose(self) -> Awaitable[None]:
        """Called once at the end, also after a failure: stop and await everything started."""
        ...


class GenerateFn(Protocol):
    """Fills one empty sample: single turn, multi-turn, tools, an agent. The smallest plug for an environment."""

    def __call__(self, sample: Sample, generate: GenerateCall) -> Awaitable[None]:
        """Called once per sample; siblings run side by side. Writes response_ids, loss_mask, log-probs, spans, status."""
        ...


class GenerateCall(Protocol):
    """Asks an engine for one completion of `input_ids`; knows the sample's seed, sampling settings and engine."""

    def __call__(self, input_ids: list[int], *, turn: int = 0, max_new_tokens: int | None = None) -> Awaitable[Completion]: ...


class RewardFn(Protocol):
    """Scores one filled sample. Sync (run in a process pool with limits) or async (run in the event loop with a limit)."""

    def __call__(self, sample: Sample) -> float | dict[str, float] | None:
        """None: unscorable. A dict must hold "reward"; its other entries become metrics."""
        ...


class GroupFilter(Protocol):
    """Decides whether a scored group is worth training on."""

    def __call__(self, group: PromptGroup) -> str | None:
        """Called once per scored group. None: keep. A string: the reason it is refused, counted by reason."""
        ...


class ProcessGone(RuntimeError):
    """The process behind one of these sockets has ended. Nothing comes of it until it is started again."""


class ProcessReplaced(RuntimeError):
    """A call went to a process that had ended, or ended under it; another one has taken its place since, and knows nothing of the call."""


class FirstStepWrong(RuntimeError):
    """What --verify-first-step found. `which`: weights, tokenisation, sampling filter, staleness, numerics or reward."""

    def __init__(self, which: str, what: str) -> None:
        super().__init__(which, what)
        self.which, self.what = which, what

    def __str__(self) -> str:
        return f"--verify-first-step: {self.which}: {self.what}"


class Engine(Protocol):
    """One inference engine: one cell of the controller, one worker. Everything is async; nothing blocks the loop."""

    async def init(self) -> None:
        """Called once, first: load the model, be ready. Past its limit the run ends and names the engine's log."""
        ...

    async def generate(self, request: GenerateRequest) -> Completion:
        """Called for each completion. While paused it waits. Raises ValueError for a request that can never work."""
        ...

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """Called to cut requests off (None: all). Their `generate` returns what there is, finish_reason abort. Returns how many."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Called before a publish: no token is sampled after it returns. Idempotent."""
        ...

    async def resume(self) -> None:
        """Called after a publish, good or bad. Idempotent."""
        ...

    async def begin_update(self, plan: PublishPlan, receiver_rank: int) -> None:
        """Called while paused, before the first bucket; for a staged plan before the pause already. `receiver_rank` is this
        engine's place, 0 .. num_receivers - 1, among those that take part in the publish. Raises ValueError when the plan does
        not fit the engine's parameters."""
        ...

    async def receive_bucket(self, index: int) -> None:
        """Called once per bucket, in order; for a concurrent plan while the trainer sends it; for a staged plan not at all."""
        ...

    async def end_update(self) -> dict[str, str]:
        """Called while paused, after the last bucket; takes all of them from a staged plan. The weights and version are the
        plan's from here on; caches of older weights are not used again. Returns the checksum by tensor name of what the engine
        now computes with ({} when the plan asks for none)."""
        ...

    async def abort_update(self) -> None:
        """Called instead of end_update when a publish failed; the engine then serves nothing until a whole one succeeds."""
        ...

    async def check_weights(self, action: str, **options: Any) -> dict[str, str]:
        """Called by check_weights: "snapshot", "reset_tensors", "compare" (returns the differing names and how), "checksum"."""
        ...

    async def offload(self) -> None:
        """Called when a colocated trainer needs the memory: weights and KV cache leave the device. Idempotent."""
        ...

    async def onload(self) -> None: ...

    async def health(self) -> EngineHealth:
        """Called by probes. Answers at once, also while busy or paused."""
        ...

    async def dispose(self) -> None:
        """Called once at the end: requests are cut off, processes ended, memory freed. Idempotent."""
        ...


class ObjectStore(Protocol):
    """Where rollout shares and critic values lie between processes. numpy arrays come out without a copy, read-only."""

    def put(self, value: Any) -> ObjectRef: ...

    def get(self, ref: ObjectRef) -> Any:
        """Blocks until the object is here (bounded). Raises KeyError for a freed one."""
        ...

    def free(self, refs: Sequence[ObjectRef]) -> None:
        """Idempotent."""
        ...

    def count(self) -> int:
        """Objects put by this process and not yet freed."""
        ...


class TrackingSink(Protocol):
    """One place where metrics go. A sink that raises is switched off with a warning and never stops a run."""

    def log(self, metrics: dict[str, float], rollout_id: int, step: int) -> None: ...

    def finish(self) -> None: ...


class WeightSender(Protocol):
    """The trainer's end of one transport. One method moves bytes, so that a fake of forty lines can stand in for it."""

    staged: bool
    """Whether the publish that was opened last has memory for every bucket, which keeps them until the next one is opened."""

    def open(self, bucket_nbytes: Sequence[int], version: int, num_receivers: int, stage: bool = False) -> dict[str, Any]:
        """Called once per publish, first; returns the plan's `channel`. `stage`: whether memory for all buckets is welcome."""
        ...

    def buffer(self, index: int) -> Any:
        """Called before bucket `index` is written: where to, a flat uint8 tensor of bucket_nbytes[index] bytes, in the
        transport's own memory where it has some. Bucket i - 2 was received everywhere by then, unless `staged`."""
        ...

    def send(self, index: int) -> None:
        """Called once per bucket, in order, when its buffer is full."""
        ...

    def close(self) -> None:
        """Called after every publish, good or bad; keeps what the next one can use again. Idempotent."""
        ...

    def dispose(self) -> None:
        """Called once at the end: nothing of ours is left on the host. Idempotent."""
        ...


class WeightReceiver(Protocol):
    """An engine's end of one transport."""

    def open(self, plan: PublishPlan, rank: int) -> None:
        """Called once per publish, before the first bucket."""
        ...

    def receive(self, index: int) -> Any:
        """Called once per bucket, in order. Returns it as a flat uint8 tensor, valid until the next call; of a staged plan
        until `close`."""
        ...

    def close(self) -> None:
        """Called after every publish, good or bad; keeps what the next one can use again. Idempotent."""
        ...

    def dispose(self) -> None:
        """Called once at the end. Idempotent."""
        ...


Values = np.ndarray
"""float32 [own tokens]: a critic's values, aligned with TrainShare.data.token_ids."""
