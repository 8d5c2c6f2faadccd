from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miles.rollout.rollout_executor import RolloutExecutor
from miles.tracking.ledger import balance, read
from miles.types import Completion, GenerateRequest
from tests.rollout.scripted_engine import ScriptedEngine
from tests.rollout.small_run import DictStore, MakeArgs, Start, publish

RUNS = itertools.count()


def numbers_of(engine: ScriptedEngine) -> list[int]:
    return engine.groups_held()


async def settle() -> None:
    """Let everything that can go on without an engine's answer go on."""
    for _ in range(60):
        await asyncio.sleep(0)


async def test_the_producer_runs_ahead_as_far_as_staleness_allows(make_args: MakeArgs, start: Start) -> None:
    engine = ScriptedEngine(hold=True)
    args = make_args(fully_async=True, max_weight_staleness=1, max_concurrent_groups=50, buffer_factor=10)
    executor = await start(args, engine)
    pending = asyncio.ensure_future(executor.get(0))
    await settle()
    assert numbers_of(engine) == [0, 1, 2, 3], "two rollouts of two: one lag allowed"
    engine.release_all()
    assert (await pending).group_indices == [0, 1]
    await settle()
    assert numbers_of(engine) == [], "nothing is started for rollout 2 before the publish"
    await publish(executor, 2, engine)
    await settle()
    assert numbers_of(engine) == [4, 5]


async def test_a_straggler_is_waited_for_when_its_last_rollout_comes(make_args: MakeArgs, start: Start) -> None:
    engine = ScriptedEngine(hold=True)
    executor = await start(make_args(fully_async=True, max_weight_staleness=2, max_concurrent_groups=50, buffer_factor=10), engine)
    trained = []
    for rollout_id in range(3):
        pending = asyncio.ensure_future(executor.get(rollout_id))
        await settle()
        for group in numbers_of(engine):
            if group != 0:
                engine.release(f"t-g{group}.")
        await settle()
        if rollout_id == 2:
            assert not pending.done(), "group 0 is due"
            engine.release_all()
        ref = await asyncio.wait_for(pending, 5)
        trained.append(ref.group_indices)
        assert ref.metrics["rollout/groups_stale"] == 0
        assert ref.metrics["rollout/weight_lag_max"] <= 2
        await publish(executor, rollout_id + 2, engine)
    assert 0 in trained[2]


async def test_a_full_buffer_blocks_the_producer(make_args: MakeArgs, start: Start) -> None:
    engine = ScriptedEngine(hold=True)
    args = make_args(fully_async=True, max_weight_staleness=50, max_concurrent_groups=3, buffer_factor=1, rollout_batch_size=2)
    executor = await start(args, engine)
    pending = asyncio.ensure_future(executor.get(0))
    await settle()
    while not pending.done():
        engine.release_all()
        await settle()
    for _ in range(20):
        engine.release_all()
        await settle()
    stats = await executor.stats()
    assert stats["groups_waiting"] <= 2 + 3
    assert engine.running == 0
    assert (await executor.get(1)).group_indices


@pytest.mark.case("C55")
@pytest.mark.parametrize("total", [1, 2, 3])
@pytest.mark.parametrize("lag", [0, 1, 2, 4])
async def test_short_runs_generate_exactly_what_they_train(make_args: MakeArgs, start: Start, total: int, lag: int) -> None:
    engine = ScriptedEngine()
    executor = await start(make_args(fully_async=True, num_rollout=total, max_weight_staleness=lag), engine)
    for rollout_id in range(total):
        await asyncio.wait_for(executor.get(rollout_id), 5)
        await publish(executor, rollout_id + 2, engine)
    await settle()
    assert len(engine.requests) == total * 4


async def test_slots_are_bounded_and_all_used(make_args: MakeArgs, start: Start) -> None:
    engine = ScriptedEngine(hold=True)
    args = make_args(fully_async=True, engine_max_running=6, n_samples_per_prompt=2, rollout_batch_size=8, max_weight_staleness=3)
    executor = await start(args, engine)
    pending = asyncio.ensure_future(executor.get(0))
    await settle()
    assert engine.running == 6, "three groups of two fill the engine's six slots"
    for written in ("t-g0.0.0", "t-g2.0.1"):
        engine.release(written)
    await settle()
    assert engine.running == 6, "two siblings that are done make room for another group"
    assert numbers_of(engine) == [0, 1, 2, 3]
    while not pending.done():
        engine.release_all()
        await settle()
    assert engine.most_running == 6


async def test_a_dead_producer_ends_the_waiting_get_and_every_later_one(make_args: MakeArgs, start: Start) -> None:
    def answer(request: GenerateRequest) -> Completion | Exception | None:
        return IndexError("a bug in the engine") if "-g3." in request.request_id else None

    executor = await start(make_args(fully_async=True, max_weight_staleness=5), ScriptedEngine(answer))
    for _ in range(2):
        with pytest.raises(IndexError, match="a bug in the engine"):
            await asyncio.wait_for(executor.get(0), 5)


async def test_a_request_that_the_engine_cancels_is_a_failed_attempt(make_args: MakeArgs, start: Start) -> None:
    lost = Counter[str]()

    def answer(request: GenerateRequest) -> None:
        lost["asked"] += 1
        if lost["asked"] == 3:
            raise asyncio.CancelledError

    for fully_async in (False, True):
        lost.clear()
        executor = await start(make_args(fully_async=fully_async, num_rollout=1), ScriptedEngine(answer))
        ref = await asyncio.wait_for(executor.get(0), 5)
        assert ref.group_indices == [0, 1]
        assert ref.metrics["rollout/groups_retried"] == 1


@pytest.mark.parametrize("policy", ["retry", "drop"])
async def test_a_publish_off_schedule_makes_groups_stale_and_the_policy_decides(make_args: MakeArgs, start: Start, policy: Any) -> None:
    engine = ScriptedEngine(hold=True)
    args = make_args(fully_async=True, max_weight_staleness=1, staleness_policy=policy, max_concurrent_groups=4, buffer_factor=5)
    executor = await start(args, engine)
    pending = asyncio.ensure_future(executor.get(0))
    await settle()
    engine.release_all()
    await pending
    await publish(executor, 9, engine)
    pending = asyncio.ensure_future(executor.get(1))
    await settle()
    engine.release_all()
    ref = await asyncio.wait_for(pending, 5)
    assert ref.metrics["rollout/groups_stale"] == 2
    assert ref.metrics["rollout/weight_lag_max"] <= 1
    assert ref.group_indices == ([2, 3] if policy == "retry" else [4, 5])
    if policy == "retry":
        assert any(request.request_id.startswith("t-g2.1.") for request in engine.requests), "a new attempt has new seeds"


async def test_engines_without_new_weights_end_the_run_instead_of_retrying_for_ever(make_args: MakeArgs, start: Start) -> None:
    executor = await start(make_args(fully_async=True, max_weight_staleness=0), ScriptedEngine())
    await executor.set_weight_version(7)
    with pytest.raises(RuntimeError, match="do all engines get new weights"):
        await asyncio.wait_for(executor.get(0), 5)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    staleness=st.integers(0, 3),
    interval=st.integers(1, 3),
    rollouts=st.integers(1, 5),
    places=st.integers(1, 6),
    trouble=st.sampled_from([0.0, 0.15]),
    policy=st.sampled_from(["retry", "keep"]),
)
@pytest.mark.case("C63")
def test_any_schedule_of_ends_failures_and_publishes(
    make_args: MakeArgs,
    tmp_path: Path,
    *,
    seed: int,
    staleness: int,
    interval: int,
    rollouts: int,
    places: int,
    trouble: float,
    policy: str,
) -> None:
    """Through the executor: no trained token is too old, each draw ends once, the checkpoint names all that is untrained, slots return."""
    dice = random.Random(seed)

    def answer(request: GenerateRequest) -> Completion | Exception | None:
        return dice.choice([ValueError("poison"), ConnectionError("lost")]) if dice.random() < trouble else None

    async def run() -> None:
        engine = ScriptedEngine(answer, hold=True)
        args = make_args(
            fully_async=True, max_weight_staleness=staleness, update_weights_interval=interval, num_rollout=rollouts, rollout_batch_size=3,
            max_concurrent_groups=places, staleness_policy=policy, name=f"run{next(RUNS)}",
        )  # fmt: skip
        executor = RolloutExecutor(args, DictStore())
        await executor.init([engine])
        await publish(executor, 1, engine)
        trained: list[int] = []
        for rollout_id in range(rollouts):
            pending = asyncio.ensure_future(executor.get(rollout_id))
            await settle()
            while not pending.done() and engine.held:
                engine.release(dice.choice(list(engine.held)))
                await settle()
            ref = await asyncio.wait_for(pending, 0.5)
            assert ref.metrics["rollout/weight_lag_max"] <= staleness
            assert not set(ref.group_indices) & set(trained)
            trained += ref.group_indices
            for _ in range(dice.randrange(12)):
                if held := list(engine.held):
                    engine.release(dice.choice(held))
                await settle()
            await executor.note_trained(rollout_id, rollout_id + 1)
            await executor.save(rollout_id, str(tmp_path))
            if (rollout_id + 1) % interval == 0:
                await publish(executor, executor.weight_version + 1, engine)
        again = RolloutExecutor(args, DictStore())
        await again.load(rollouts - 1, str(tmp_path))
        lines = list(read(Path(args.run_dir) / "ledger.jsonl"))
        dropped = {line["group_index"] for line in lines if line["event"] == "dropped"}
        future = [group.group_index for _ in range(12) if (group := again.data.take()) is not None]
        assert not set(future) & set(trained)
        assert sorted({*future, *trained, *dropped}) == list(range(max([*future, *trained, *dropped]) + 1)), "a draw was lost"
        await executor.dispose()
        await again.dispose()
        assert engine.running == 0
        assert executor.store.count() == 0 or not executor.stored
        account = balance(read(Path(args.run_dir) / "ledger.jsonl"))
        assert account.holds
        assert not account.open
        assert account.ended["trained"] == 3 * rollouts

    try:
        asyncio.run(run())
    except RuntimeError as error:
        if "groups in a row failed" not in str(error):
            raise
