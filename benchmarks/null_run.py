"""A whole run whose engine and trainer do nothing, or wait: what is left is the driver, the executor, the reward, packing, tracking."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import miles.engines.embedded.engine
import miles.train.trainer
import train_async
from miles.types import Completion, EngineHealth, FinishReason, GenerateRequest, PublishPlan, TrainResult, VersionSpan

ROOT = Path(__file__).parent.parent
TOKENS = 16


@dataclass
class Pace:
    """How long the two take; and what the engine counts."""

    answer: float = 0.0  # seconds of one completion
    train: float = 0.0  # seconds of one rollout's training
    generated: int = 0  # tokens, those of cut off requests too
    cpu: list[float] = field(default_factory=list)  # seconds of this process when each training began


PACE = Pace()


class NullEngine:
    """Answers every request with the same tokens, after a while."""

    def __init__(self, args: Any, name: str) -> None:
        self.version = 0

    async def init(self) -> None: ...

    async def generate(self, request: GenerateRequest) -> Completion:
        begun = time.monotonic()
        try:
            await asyncio.sleep(PACE.answer)
        finally:
            share = min((time.monotonic() - begun) / PACE.answer, 1.0) if PACE.answer else 1.0
            PACE.generated += round(TOKENS * share)
        tokens = [5 + request.sampling.seed % 200] * TOKENS
        return Completion(request.request_id, tokens, [-0.5] * TOKENS, FinishReason.LENGTH, [VersionSpan(0, TOKENS, self.version)])

    async def begin_update(self, plan: PublishPlan, receiver_rank: int = 0) -> None:
        self.version = plan.version

    async def end_update(self) -> dict[str, str]:
        return {}

    async def health(self) -> EngineHealth:
        return EngineHealth(True, self.version, 0, 0, paused=False)

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        return 0

    async def pause(self, mode: str) -> None: ...

    async def resume(self) -> None: ...

    async def receive_bucket(self, index: int) -> None: ...

    async def abort_update(self) -> None: ...

    async def dispose(self) -> None: ...


class NullTrainer:
    """Makes steps of nothing."""

    def __init__(self, args: Any, role: str, rank: int, world_size: int, store: Any) -> None:
        self.store, self.step = store, 0

    def init(self, address: str, port: int) -> None: ...

    def train(self, rollout_id: int, share: Any, values: Any = None) -> TrainResult:
        PACE.cpu.append(time.process_time())
        self.store.get(share)
        time.sleep(PACE.train)
        self.step += 1
        return TrainResult([{"train/loss": 0.0}], self.step, 0.0)

    def plan_publish(self, version: int, num_receivers: int = 1, one_host: bool = True) -> PublishPlan:
        return PublishPlan(version, "shared_memory", (), (), {}, "")

    def end_publish(self) -> dict[str, str]:
        return {}

    def abort_publish(self) -> None: ...

    def dispose(self) -> None: ...


def reward(sample: Any) -> float:
    return float(sample.response_ids[0] % 2)


def run(folder: Path, name: str, pace: Pace, flags: dict[str, object]) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl. `pace.generated` and `pace.cpu` are filled."""
    global PACE
    PACE = pace
    miles.engines.embedded.engine.EmbeddedEngine = NullEngine  # type: ignore[misc,assignment]
    miles.train.trainer.Trainer = NullTrainer  # type: ignore[misc,assignment]
    settings = {"--run-root": folder, "--name": name, "--console": "quiet", "--log-level": "error", "--reward": f"{__name__}.reward"}
    settings |= {"--prompt-data": write_prompts(folder / "prompts.jsonl"), "--save-samples": 0, "--max-response-length": TOKENS}
    argv = [str(part) for flag, value in (settings | flags).items() for part in ((flag,) if value is True else (flag, value))]
    train_async.main(["--config", str(ROOT / "recipes" / "tiny" / "run.toml"), "--in-process", *argv])
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def write_prompts(path: Path) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"What is {number}?", "label": str(number)}) + "\n" for number in range(1024)))
    return path
