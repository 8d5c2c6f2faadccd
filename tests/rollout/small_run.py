"""A small run's settings, data and executor, in this process."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from miles.config.run_config import RunConfig
from miles.rollout.rollout_executor import RolloutExecutor
from miles.train.random_model import ensure_model
from miles.types import ObjectRef

MakeArgs = Callable[..., RunConfig]
Start = Callable[..., Any]


class DictStore:
    """An ObjectStore in this process."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.numbers = itertools.count()

    def put(self, value: Any) -> ObjectRef:
        ref = ObjectRef(f"o{next(self.numbers)}")
        self.objects[ref.key] = value
        return ref

    def get(self, ref: ObjectRef) -> Any:
        return self.objects[ref.key]

    def free(self, refs: Sequence[ObjectRef]) -> None:
        for ref in refs:
            self.objects.pop(ref.key, None)

    def count(self) -> int:
        return len(self.objects)


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


async def publish(executor: RolloutExecutor, version: int, *engines: Any) -> None:
    """New weights: first the engines have them, then the executor hears of it."""
    for engine in engines:
        engine.version = version
    await executor.set_weight_version(version)


async def until(condition: Callable[[], bool], turns: int = 2000) -> None:
    """Let the event loop turn until `condition` holds. A turn is no time, so this waits for work and not for a clock."""
    for _ in range(turns):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the event loop came to rest first")


@pytest.fixture(name="tiny_model", scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model with its tokenizer; most tests read the tokenizer only."""
    return str(ensure_model("random:tiny", 0, tmp_path_factory.mktemp("models")))


@pytest.fixture(name="make_args")
def small_run(tmp_path: Path, tiny_model: str) -> MakeArgs:
    """Settings of a small run over `rows` prompts (a number, or the rows themselves)."""

    def make(rows: int | list[dict[str, Any]] = 64, **settings: Any) -> RunConfig:
        if isinstance(rows, int):
            rows = [{"prompt": f"question {number}", "label": str(number)} for number in range(rows)]
        base: dict[str, Any] = {
            "hf_checkpoint": tiny_model,
            "prompt_data": write_rows(tmp_path / "prompts.jsonl", rows),
            "run_root": str(tmp_path / "runs"),
            "rollout_batch_size": 2,
            "n_samples_per_prompt": 2,
            "num_rollout": 100,
            "reward": "tests.rollout.plugs.by_place",
            "shuffle": False,
        }
        return RunConfig(**(base | settings))

    return make


@pytest.fixture(name="start")
async def started_executors() -> AsyncIterator[Start]:
    """Start an executor over engines; all are disposed at the end."""
    started: list[RolloutExecutor] = []

    async def begin(args: RunConfig, *engines: Any, version: int = 1, load: tuple[int, Path] | None = None) -> RolloutExecutor:
        executor = RolloutExecutor(args, DictStore())
        started.append(executor)
        await executor.init(list(engines))
        if load is not None:
            await executor.load(load[0], str(load[1]))
        for engine in engines:
            if hasattr(engine, "version"):
                engine.version = version
        await executor.set_weight_version(version)
        return executor

    yield begin
    for executor in started:
        await executor.dispose()
