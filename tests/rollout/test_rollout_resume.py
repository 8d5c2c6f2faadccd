from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from miles.rollout.cursor import merged
from tests.rollout.scripted_engine import ScriptedEngine
from tests.rollout.small_run import MakeArgs, Start, publish


def state(following: int, returned: list[list[int]]) -> dict[str, object]:
    return {"next_group_index": following, "returned": returned, "rows": 9}


def test_untrained_draws_are_taken_again_first_and_in_order() -> None:
    assert merged(state(10, []), [7, 8, 9]) == state(7, [])
    assert merged(state(10, []), []) == state(10, [])
    assert merged(state(10, []), [2, 5, 9]) == state(9, [[2, 0], [5, 0]])
    assert merged(state(10, [[4, 2]]), [9, 3]) == state(9, [[3, 0], [4, 2]])
    assert merged(state(10, [[9, 1]]), [8]) == state(10, [[8, 0], [9, 1]]), "an attempt is not forgotten"
    assert merged(state(2, []), [0, 1]) == state(0, [])


@pytest.mark.case("C63")
async def test_the_saved_cursor_is_the_end_of_the_trained_batch_not_of_the_generated(
    make_args: MakeArgs, start: Start, tmp_path: Path
) -> None:
    args = make_args(100, rollout_batch_size=32, n_samples_per_prompt=1)
    executor = await start(args, ScriptedEngine())
    for rollout_id in range(4):
        await executor.get(rollout_id)
    await executor.note_trained(0, 1)
    await executor.note_trained(1, 2)
    await executor.save(1, str(tmp_path))
    saved = json.loads((tmp_path / "executor.json").read_text())
    assert saved["data"]["next_group_index"] == 64
    assert saved["data"]["returned"] == []
    again = await start(args, ScriptedEngine(), load=(1, tmp_path))
    assert (await again.get(2)).group_indices == list(range(64, 96))


@pytest.mark.case("C63")
async def test_a_resumed_plain_run_makes_the_same_rollouts(make_args: MakeArgs, start: Start, tmp_path: Path) -> None:
    def shares(executor: object, ref: object) -> bytes:
        data = [executor.store.get(share).data for share in ref.shares]  # type: ignore[attr-defined]
        return b"".join(each.token_ids.tobytes() + each.likeliest.ids.tobytes() + each.likeliest.logprobs.tobytes() for each in data)

    args = make_args(
        30, score_centering=2, rollout_batch_size=3, reward="tests.rollout.plugs.by_parity", group_filter="reward_spread", num_trainers=2
    )
    executor = await start(args, ScriptedEngine())
    refs = [await executor.get(rollout_id) for rollout_id in range(2)]
    pending = asyncio.ensure_future(executor.get(2))
    await asyncio.sleep(0)
    await executor.save(0, str(tmp_path))
    refs.append(await pending)
    assert sum(ref.metrics["rollout/groups_filtered"] for ref in refs) > 0, "the case wants refused groups"
    again = await start(args, ScriptedEngine(), load=(0, tmp_path))
    for rollout_id in (1, 2):
        ref = await again.get(rollout_id)
        assert ref.group_indices == refs[rollout_id].group_indices
        assert ref.metrics == refs[rollout_id].metrics
        assert shares(again, ref) == shares(executor, refs[rollout_id])


@pytest.mark.case("C63")
async def test_what_the_producer_has_in_flight_and_waiting_is_taken_again(make_args: MakeArgs, start: Start, tmp_path: Path) -> None:
    engine = ScriptedEngine(hold=True)
    args = make_args(fully_async=True, max_weight_staleness=3, max_concurrent_groups=5, buffer_factor=2)
    executor = await start(args, engine)
    pending = asyncio.ensure_future(executor.get(0))
    for _ in range(50):
        await asyncio.sleep(0)
    for group in (1, 3, 4):
        engine.release(f"t-g{group}.")
    ref = await asyncio.wait_for(pending, 5)
    assert ref.group_indices == [1, 3]
    await executor.save(0, str(tmp_path))
    await publish(executor, 2, engine)
    again = await start(args, fast := ScriptedEngine(), load=(0, tmp_path), version=2)
    trained = [1, 3]
    for rollout_id in (1, 2, 3):
        trained += (await asyncio.wait_for(again.get(rollout_id), 5)).group_indices
        await publish(again, rollout_id + 2, fast)
    assert sorted(trained) == list(range(8)), "none lost, none twice"


@pytest.mark.parametrize(
    "changed",
    [
        {"n_samples_per_prompt": 3},
        {"rollout_batch_size": 4},
        {"temperature": 0.7},
        {"seed": 5},
        {"reward": "tests.rollout.plugs.by_parity"},
        {"fully_async": True, "deterministic": False},
        {"fully_async": False},
        {"max_weight_staleness": 0},
    ],
)
async def test_what_was_generated_under_other_settings_is_not_trained(
    make_args: MakeArgs, start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture, changed: dict[str, object]
) -> None:
    before: dict[str, object] = {"fully_async": True, "deterministic": True, "max_weight_staleness": 2}
    executor = await start(make_args(40, **before), ScriptedEngine())
    for rollout_id in range(2):
        await executor.get(rollout_id)
    await executor.note_trained(0, 1)
    await executor.save(0, str(tmp_path))
    same = await start(make_args(40, **before), engine := ScriptedEngine(), load=(0, tmp_path))
    await same.get(1)
    assert not engine.requests, "the checkpoint brings this rollout along"
    assert "generated again" not in caplog.text
    args = make_args(40, **before | changed)
    other = await start(args, engine := ScriptedEngine(), load=(0, tmp_path), version=2)
    ref = await asyncio.wait_for(other.get(1), 5)
    assert ref.num_samples == args.samples_per_rollout
    assert len(engine.requests) >= ref.num_samples
    name, value = next((name, value) for name, value in changed.items() if before.get(name) != value)
    assert f"--{name.replace('_', '-')} {value} (was " in caplog.text


async def test_a_state_that_cannot_be_used_is_refused_by_name(make_args: MakeArgs, start: Start, tmp_path: Path) -> None:
    executor = await start(make_args(), ScriptedEngine())
    with pytest.raises(ValueError, match=r"--load: no usable .*executor\.json"):
        await executor.load(0, str(tmp_path))
    await executor.get(0)
    await executor.save(0, str(tmp_path))
    with pytest.raises(ValueError, match="is of rollout 0, the trainers restored 3"):
        await executor.load(3, str(tmp_path))
    left = sorted(path.name for path in tmp_path.iterdir() if path.is_file() and path.name != "prompts.jsonl")
    assert left == ["executor.json", "executor.npz"], "no temporary file is left"


async def test_versions_never_go_backwards(make_args: MakeArgs, start: Start) -> None:
    executor = await start(make_args(), ScriptedEngine(), version=4)
    with pytest.raises(ValueError, match="weight version 3 after 4"):
        await executor.set_weight_version(3)


async def test_too_few_prompts_and_no_engines_are_refused_at_start(make_args: MakeArgs, start: Start) -> None:
    executor = await start(make_args(3, rollout_batch_size=4), ScriptedEngine())
    with pytest.raises(ValueError, match="3 prompts, fewer than --rollout-batch-size 4"):
        await executor.num_rollout_per_epoch()
    with pytest.raises(ValueError, match="fewer than --rollout-batch-size"):
        await start(make_args(3, rollout_batch_size=4, num_rollout=None, num_epoch=2), ScriptedEngine())
    with pytest.raises(ValueError, match="--num-engines"):
        await start(make_args())
    executor = await start(make_args(11, rollout_batch_size=4, num_rollout=None, num_epoch=3), ScriptedEngine())
    assert await executor.num_rollout_per_epoch() == 2
    assert executor.context.num_rollout == 6
