"""The fixed schedule of --fully-async --deterministic."""

from __future__ import annotations

import asyncio

import pytest

from tests.rollout.scripted_engine import ScriptedEngine
from tests.rollout.small_run import MakeArgs, Start, publish


@pytest.mark.parametrize(("staleness", "interval"), [(0, 1), (1, 1), (2, 1), (3, 1), (1, 2), (2, 3)])
async def test_a_rollout_s_version_is_a_function_of_its_number(make_args: MakeArgs, start: Start, staleness: int, interval: int) -> None:
    total = 8
    args = make_args(
        fully_async=True, deterministic=True, max_weight_staleness=staleness, update_weights_interval=interval, num_rollout=total
    )
    engine = ScriptedEngine()
    executor = await start(args, engine)
    for rollout_id in range(total):
        ref = await asyncio.wait_for(executor.get(rollout_id), 5)
        version = rollout_id // interval + 1
        written_by = {int(v) for share in ref.shares for v in executor.store.get(share).data.weight_versions if v >= 0}
        assert written_by == {max(1, version - staleness)}
        assert ref.metrics["rollout/weight_version"] == version
        await executor.note_trained(rollout_id, rollout_id + 1)
        if (rollout_id + 1) % interval == 0:
            await asyncio.wait_for(executor.quiet(), 5)
            assert engine.running == 0, "nothing straddles a publish"
            await publish(executor, version + 1, engine)
    assert len(engine.requests) == total * args.samples_per_rollout, "nothing is generated after the last rollout"


async def test_a_publish_waits_for_what_is_in_flight(make_args: MakeArgs, start: Start) -> None:
    engine = ScriptedEngine(hold=True)
    executor = await start(make_args(fully_async=True, deterministic=True, max_weight_staleness=1), engine)
    pending, quiet = asyncio.ensure_future(executor.get(0)), None
    for _ in range(3):
        for _ in range(100):
            await asyncio.sleep(0)
        quiet = quiet or asyncio.ensure_future(executor.quiet())
        if not engine.held:
            break
        assert not quiet.done()
        engine.release_all()
    assert (await asyncio.wait_for(pending, 5)).group_indices == [0, 1]
    await asyncio.wait_for(quiet, 5)
    assert len(engine.requests) == 8, "rollouts 0 and 1 start under version 1, and 2 waits for version 2"


async def test_a_failure_ends_the_run_instead_of_changing_its_numbers(make_args: MakeArgs, start: Start) -> None:
    for fully in (True, False):
        engine = ScriptedEngine(lambda request: RuntimeError("lost"))
        executor = await start(make_args(fully_async=fully, deterministic=True), engine)
        with pytest.raises(RuntimeError, match="with --deterministic this ends the run"):
            await executor.get(0)
