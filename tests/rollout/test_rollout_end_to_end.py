"""The executor with the real engine, a real reward and a real tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from miles.config.run_config import RunConfig
from miles.engines.embedded.engine import EmbeddedEngine
from miles.types import EngineHealth, TrainShare
from tests.rollout.small_run import MakeArgs, Start

StartEngines = Any


@pytest.fixture
async def engines() -> AsyncIterator[StartEngines]:
    started: list[EmbeddedEngine] = []

    async def begin(args: RunConfig) -> list[EmbeddedEngine]:
        made = [EmbeddedEngine(args, f"engine-{index}") for index in range(args.num_engines)]
        started.extend(made)
        for engine in made:
            await engine.init()
        return made

    yield begin
    for engine in started:
        await engine.dispose()


def small(make_args: MakeArgs, **settings: Any) -> RunConfig:
    base = {
        "rollout_batch_size": 3, "n_samples_per_prompt": 4, "max_response_length": 12, "engine_max_running": 8, "engine_max_context": 128,
        "device": "cpu", "num_rollout": 2, "reward": "last_number", "reward_workers": 0,
    }  # fmt: skip
    return make_args(8, **(base | settings))


async def until_health(engine: EmbeddedEngine, condition: Callable[[EngineHealth], bool]) -> None:
    """The engine computes in a thread of its own: look again until it is so, five seconds at most."""
    for _ in range(5000):
        if condition(await engine.health()):
            return
        await asyncio.sleep(0.001)
    raise AssertionError(f"the engine stays at {await engine.health()}")


async def columns(executor: Any, rollout_id: int) -> tuple[TrainShare, dict[str, float]]:
    ref = await asyncio.wait_for(executor.get(rollout_id), 60)
    return executor.store.get(ref.shares[0]), ref.metrics


async def test_plain_mode_gives_the_same_bits_twice(make_args: MakeArgs, start: Start, engines: StartEngines) -> None:
    runs = []
    for _ in range(2):
        args = small(make_args, num_engines=2)
        executor = await start(args, *await engines(args), version=0)
        runs.append([await columns(executor, rollout_id) for rollout_id in range(2)])
    for (one, metrics), (two, same_metrics) in zip(*runs, strict=True):
        assert metrics == same_metrics
        for name in ("token_ids", "rollout_logprobs", "rewards", "weight_versions"):
            np.testing.assert_array_equal(getattr(one.data, name), getattr(two.data, name))
    data = runs[0][0][0].data
    assert data.num_samples == 12
    assert (data.rollout_logprobs[data.loss_mask == 1] < 0).all()
    assert set(data.weight_versions[data.loss_mask == 1].tolist()) == {0}


async def test_fully_async_fills_every_rollout(make_args: MakeArgs, start: Start, engines: StartEngines) -> None:
    args = small(make_args, fully_async=True, max_weight_staleness=1)
    executor = await start(args, *await engines(args), version=0)
    for rollout_id in range(2):
        share, metrics = await columns(executor, rollout_id)
        assert share.data.num_samples == 12
        assert metrics["rollout/weight_lag_max"] == 0
    (engine,) = executor.router._places
    assert engine.running == 0


async def test_dispose_in_the_middle_leaves_idle_engines(make_args: MakeArgs, start: Start, engines: StartEngines) -> None:
    for fully_async in (False, True):
        args = small(make_args, fully_async=fully_async, max_response_length=100, ignore_eos=True)
        (engine,) = await engines(args)
        executor = await start(args, engine, version=0)
        pending = asyncio.ensure_future(executor.get(0))
        await until_health(engine, lambda health: health.running > 0)
        await executor.dispose()
        with pytest.raises(RuntimeError, match="disposed"):
            await pending
        await until_health(engine, lambda health: health.running + health.waiting == 0)


@pytest.mark.case("C57")
async def test_a_prompt_that_engines_refuse_is_dropped(make_args: MakeArgs, start: Start, engines: StartEngines) -> None:
    rows = [{"prompt": "word " * 400 if number == 1 else f"{number} and 1", "label": "1"} for number in range(6)]
    args = make_args(
        rows, rollout_batch_size=2, n_samples_per_prompt=2, max_response_length=4, engine_max_context=2048, device="cpu", num_rollout=2,
        reward="last_number", reward_workers=0,
    )  # fmt: skip
    executor = await start(args, *await engines(args.model_copy(update={"engine_max_context": 96})), version=0)
    ref = await asyncio.wait_for(executor.get(0), 60)
    assert ref.group_indices == [0, 2]
    assert ref.metrics["rollout/groups_dropped/refused"] == 1
