from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles.protocols import ProcessGone
from miles.tracking.ledger import balance, read
from miles.types import Completion, GenerateRequest, TrainShare
from tests.rollout.scripted_engine import ScriptedEngine, complete
from tests.rollout.small_run import MakeArgs, Start, publish, until


def share_of(executor: Any, ref: Any) -> TrainShare:
    (share,) = [executor.store.get(key) for key in ref.shares]
    return share


async def test_a_rollout_is_whole_groups_in_draw_order(make_args: MakeArgs, start: Start) -> None:
    executor = await start(make_args(rollout_batch_size=3, n_samples_per_prompt=4), ScriptedEngine())
    for rollout_id in range(3):
        ref = await executor.get(rollout_id)
        assert ref.group_indices == [3 * rollout_id + place for place in range(3)]
        assert ref.num_samples == 12
        assert share_of(executor, ref).data.sample_indices.tolist() == list(range(12 * rollout_id, 12 * rollout_id + 12))
        assert ref.metrics["rollout/reward"] == 0.5
        assert ref.metrics["rollout/weight_lag_max"] == 0


async def test_every_rollout_is_one_wave_and_groups_go_to_engines_in_turn(make_args: MakeArgs, start: Start) -> None:
    engines = [ScriptedEngine(), ScriptedEngine()]
    executor = await start(make_args(rollout_batch_size=5, n_samples_per_prompt=3), *engines)
    await executor.get(0)
    for index, (engine, groups) in enumerate(zip(engines, ([0, 2, 4], [1, 3]), strict=True)):
        waves = [request.wave for request in engine.requests]
        assert {wave.wave_id for wave in waves} == {"r0.0.w0"}, index
        assert {wave.size for wave in waves} == {3 * len(groups)}
        in_order = sorted(engine.requests, key=lambda request: request.wave.order)
        assert [request.request_id for request in in_order] == [f"r0.0-g{group}.0.{place}.0." for group in groups for place in range(3)]


async def test_the_same_run_twice_gives_the_same_columns_and_metrics(make_args: MakeArgs, start: Start) -> None:
    async def run() -> list[tuple[bytes, dict[str, float]]]:
        poison = {3, 8}

        def answer(request: GenerateRequest) -> Completion | Exception | None:
            group = int(request.request_id.split("-g")[1].split(".")[0])
            return ValueError("too long") if group in poison else None

        args = make_args(rollout_batch_size=4, n_samples_per_prompt=3, reward="tests.rollout.plugs.by_tokens", group_filter="reward_spread")
        executor = await start(args, ScriptedEngine(answer), ScriptedEngine(answer))
        out = []
        for rollout_id in range(4):
            ref = await executor.get(rollout_id)
            out.append((share_of(executor, ref).data.token_ids.tobytes(), ref.metrics))
        return out

    assert await run() == await run()


@pytest.mark.case("C27")
async def test_three_prompts_serve_24_draws_over_eight_epochs(make_args: MakeArgs, start: Start) -> None:
    executor = await start(make_args(3, rollout_batch_size=8, shuffle=True), ScriptedEngine())
    drawn: Counter[bytes] = Counter()
    orders = []
    for rollout_id in range(3):
        data = share_of(executor, await executor.get(rollout_id)).data
        for sample in range(0, data.num_samples, 2):
            prompt = data.token_ids[data.offsets[sample] : data.offsets[sample] + data.prompt_lengths[sample]]
            assert len(prompt)
            drawn[prompt.tobytes()] += 1
            orders.append(prompt.tobytes())
    assert list(drawn.values()) == [8, 8, 8]
    assert len({tuple(orders[place : place + 3]) for place in range(0, 24, 3)}) > 1, "each pass has its own order"


@pytest.mark.case("C27")
@pytest.mark.case("C49")
@pytest.mark.parametrize("fully_async", [False, True])
async def test_used_up_data_ends_the_run_with_the_numbers(make_args: MakeArgs, start: Start, fully_async: bool) -> None:
    executor = await start(make_args(4, num_rollout=6, num_epoch=1, fully_async=fully_async), ScriptedEngine())
    for rollout_id in range(2):
        await executor.get(rollout_id)
    with pytest.raises(RuntimeError, match=r"used up: 4 prompts .* --num-epoch 1 times 4 rows, and rollout 2 of 6 has only 0 of its 2"):
        await asyncio.wait_for(executor.get(2), 5)


@pytest.mark.case("C49")
@pytest.mark.parametrize("fully_async", [False, True])
async def test_four_prompts_make_six_rollouts_over_three_passes(make_args: MakeArgs, start: Start, fully_async: bool) -> None:
    executor = await start(make_args(4, num_rollout=6, fully_async=fully_async), engine := ScriptedEngine())
    seen: list[int] = []
    for rollout_id in range(6):
        seen += (await asyncio.wait_for(executor.get(rollout_id), 5)).group_indices
        await publish(executor, rollout_id + 2, engine)
    assert sorted(seen) == list(range(12))


@pytest.mark.case("C48")
@pytest.mark.parametrize("fully_async", [False, True])
async def test_uniform_groups_are_replaced_and_the_others_kept_whole(make_args: MakeArgs, start: Start, fully_async: bool) -> None:
    labels = [[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0]]
    rows = [{"prompt": f"question {number}", "label": label} for number, label in enumerate(labels)]
    args = make_args(
        rows, rollout_batch_size=4, n_samples_per_prompt=4, reward="tests.rollout.plugs.by_label", group_filter="reward_spread",
        fully_async=fully_async, num_rollout=1,
    )  # fmt: skip
    executor = await start(args, ScriptedEngine())
    ref = await executor.get(0)
    kept = [index % 6 for index in ref.group_indices]
    assert not {3, 4} & set(kept)
    assert len(kept) == 4
    if not fully_async:
        assert ref.group_indices == [0, 1, 2, 5]
        assert ref.metrics["rollout/groups_filtered"] == 2
        assert ref.metrics["rollout/groups_filtered/same_reward"] == 2
        assert ref.metrics["rollout/waves"] == 3


@pytest.mark.case("C48")
@pytest.mark.parametrize("fully_async", [False, True])
async def test_a_data_set_that_is_all_refused_ends_with_counts(make_args: MakeArgs, start: Start, fully_async: bool) -> None:
    args = make_args(group_filter="tests.rollout.plugs.refuse_everything", group_filter_limit=5, fully_async=fully_async)
    executor = await start(args, ScriptedEngine())
    with pytest.raises(RuntimeError, match=r"filtered 10 of 10 groups \(10 x never\).* rollout of 2; that is --group-filter-limit 5 times"):
        await asyncio.wait_for(executor.get(0), 5)


@pytest.mark.case("C57")
@pytest.mark.parametrize("fully_async", [False, True])
async def test_a_poisonous_prompt_is_dropped_and_another_takes_its_place(
    make_args: MakeArgs, start: Start, tmp_path: Path, fully_async: bool
) -> None:
    asked: Counter[int] = Counter()

    def answer(request: GenerateRequest) -> Completion | Exception | None:
        group = int(request.request_id.split("-g")[1].split(".")[0])
        asked[group] += 1
        return ValueError("400: prompt is too long") if group % 8 == 3 else None

    args = make_args(8, rollout_batch_size=4, num_rollout=4, fully_async=fully_async)
    executor = await start(args, engine := ScriptedEngine(answer))
    trained: list[int] = []
    for rollout_id in range(4):
        trained += (await asyncio.wait_for(executor.get(rollout_id), 5)).group_indices
        await executor.note_trained(rollout_id, rollout_id + 1)
        await publish(executor, rollout_id + 2, engine)
    assert len(set(trained)) == 16
    assert not any(index % 8 == 3 for index in trained)
    assert max(count for group, count in asked.items() if group % 8 == 3) <= 2, "a refusal is not retried"
    await executor.dispose()
    dropped = [line for line in read(Path(args.run_dir) / "ledger.jsonl") if line["event"] == "dropped"]
    assert dropped[0]["group_index"] == 3
    assert dropped[0]["prompt"] == 3
    assert "prompt is too long" in dropped[0]["detail"]


@pytest.mark.parametrize("fully_async", [False, True])
async def test_a_failing_engine_is_asked_again_with_other_seeds_and_then_given_up(
    make_args: MakeArgs, start: Start, fully_async: bool
) -> None:
    seeds: dict[str, int] = {}

    def answer(request: GenerateRequest) -> Completion | Exception | None:
        seeds[request.request_id] = request.sampling.seed
        return ConnectionError("lost") if "-g0." in request.request_id else None

    executor = await start(make_args(group_retries=2, fully_async=fully_async), ScriptedEngine(answer))
    ref = await asyncio.wait_for(executor.get(0), 5)
    assert 0 not in ref.group_indices
    attempts = {request_id.split("-g0.")[1].split(".")[0] for request_id in seeds if "-g0." in request_id}
    assert attempts == {"0", "1", "2"}
    assert len(set(seeds.values())) == len(seeds)
    if not fully_async:
        assert ref.metrics["rollout/groups_dropped/engine"] == 1
        assert ref.metrics["rollout/groups_retried"] == 2


@pytest.mark.parametrize("fully_async", [False, True])
async def test_while_no_engine_lives_groups_wait_and_use_up_no_retries(make_args: MakeArgs, start: Start, fully_async: bool) -> None:
    gone = True
    engine = ScriptedEngine(lambda request: ProcessGone("killed") if gone else None)
    executor = await start(make_args(rollout_batch_size=3, group_retries=1, fully_async=fully_async), engine)
    getting = asyncio.ensure_future(executor.get(0))
    await until(lambda: not executor.router.live)
    for _ in range(500):
        await asyncio.sleep(0)
    assert not getting.done()
    gone = False
    await executor.set_engine_live(0, True)
    ref = await asyncio.wait_for(getting, 5)
    assert ref.metrics.get("rollout/groups_dropped/engine", 0) == 0
    assert fully_async or ref.group_indices == [0, 1, 2]


@pytest.mark.parametrize("fully_async", [False, True])
async def test_nothing_but_failures_ends_the_run_with_the_last_one(make_args: MakeArgs, start: Start, fully_async: bool) -> None:
    executor = await start(make_args(rollout_batch_size=4, fully_async=fully_async), ScriptedEngine(lambda _: OSError("cable out")))
    with pytest.raises(RuntimeError, match=r"4 groups in a row failed and were dropped \(4 x engine\).*cable out"):
        await asyncio.wait_for(executor.get(0), 5)


@pytest.mark.case("C51")
@pytest.mark.parametrize("fully_async", [False, True])
async def test_one_stuck_judge_costs_its_group_and_not_the_step(make_args: MakeArgs, start: Start, fully_async: bool) -> None:
    rows = [{"prompt": f"question {number}", "label": "stuck" if number == 2 else ""} for number in range(9)]
    args = make_args(
        rows, rollout_batch_size=8, n_samples_per_prompt=4, reward="tests.rollout.plugs.stuck", sample_timeout=0.2, group_retries=1,
        fully_async=fully_async, max_concurrent_groups=4, num_rollout=1,
    )  # fmt: skip
    engine = ScriptedEngine()
    executor = await start(args, engine)
    ref = await asyncio.wait_for(executor.get(0), 10)
    assert sorted(ref.group_indices) == [0, 1, 3, 4, 5, 6, 7, 8]
    assert ref.metrics["rollout/groups_dropped/timeout"] == 1
    assert engine.running == 0
    stats = await executor.stats()
    assert not stats["waves"]
    assert not stats.get("groups_in_flight")


async def test_code_that_will_not_be_cancelled_is_left_behind(
    make_args: MakeArgs, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("miles.rollout.group.DEAF_AFTER", 0.05)
    args = make_args(generate_function="tests.rollout.plugs.deaf", sample_timeout=0.1, group_retries=0)
    executor = await start(args, ScriptedEngine())
    ref = await asyncio.wait_for(executor.get(0), 4)
    assert ref.group_indices == [1, 2]
    assert "tasks go on although they were cancelled" in caplog.text


@pytest.mark.parametrize("fully_async", [False, True])
async def test_a_users_bug_ends_the_call_at_once_as_it_was_raised(make_args: MakeArgs, start: Start, fully_async: bool) -> None:
    engine = ScriptedEngine(hold=True)
    executor = await start(make_args(generate_function="tests.rollout.plugs.buggy_generate", fully_async=fully_async), engine)
    with pytest.raises(TypeError, match="a bug in my environment"):
        await asyncio.wait_for(executor.get(0), 5)
    executor = await start(make_args(reward="tests.rollout.plugs.raises", fully_async=fully_async), ScriptedEngine())
    with pytest.raises(RuntimeError, match="no such thing in my reward"):
        await asyncio.wait_for(executor.get(0), 5)


@pytest.mark.case("C33")
@pytest.mark.parametrize("fully_async", [False, True])
async def test_columns_that_do_not_pair_up_never_reach_training(make_args: MakeArgs, start: Start, fully_async: bool) -> None:
    executor = await start(make_args(generate_function="tests.rollout.plugs.broken_generate", fully_async=fully_async), ScriptedEngine())
    with pytest.raises(ValueError, match=r"response_ids, \d+ in loss_mask"):
        await asyncio.wait_for(executor.get(0), 5)

    def shifted(request: GenerateRequest) -> Completion:
        completion = complete(request, [300, 301])
        completion.logprobs.append(-0.1)
        return completion

    executor = await start(make_args(fully_async=fully_async), ScriptedEngine(shifted))
    with pytest.raises(RuntimeError, match="2 tokens with 3 log-probs"):
        await asyncio.wait_for(executor.get(0), 5)


async def test_a_rollout_that_takes_too_long_says_what_it_waits_for(make_args: MakeArgs, start: Start) -> None:
    executor = await start(make_args(generate_timeout=0.05), ScriptedEngine(hold=True))
    with pytest.raises(TimeoutError, match=r"rollout 0 took longer than --generate-timeout 0.05 s; in flight: .*'requests_in_engines': 4"):
        await executor.get(0)


@pytest.mark.parametrize("fully_async", [False, True])
async def test_dispose_ends_a_pending_call_and_leaves_nothing(make_args: MakeArgs, start: Start, fully_async: bool) -> None:
    engine = ScriptedEngine(hold=True)
    args = make_args(fully_async=fully_async)
    executor = await start(args, engine)
    before = asyncio.all_tasks()
    pending = asyncio.ensure_future(executor.get(0))
    await until(lambda: engine.running >= 4)
    await executor.dispose()
    with pytest.raises(RuntimeError, match="disposed"):
        await pending
    assert engine.running == 0
    assert len(engine.aborted) >= 4
    assert asyncio.all_tasks() == before
    assert executor.store.count() == 0
    account = balance(read(Path(args.run_dir) / "ledger.jsonl"))
    assert account.holds
    assert not account.open


async def test_a_call_that_is_cancelled_while_dispose_runs_is_cancelled_and_no_error(make_args: MakeArgs, start: Start) -> None:
    """As at a Ctrl-C in one process: the loop cancels the call, whose end takes longer than the dispose that follows."""
    engine = ScriptedEngine(hold=True)
    executor = await start(make_args(generate_function="tests.rollout.plugs.slow_to_end"), engine)
    pending = asyncio.ensure_future(executor.get(0))
    await until(lambda: engine.running >= 4)
    pending.cancel()
    await executor.dispose()
    with pytest.raises(asyncio.CancelledError):
        await pending


@pytest.mark.case("C23")
async def test_prompts_that_are_left_out_are_in_the_metrics(make_args: MakeArgs, start: Start) -> None:
    rows = [{"prompt": "short", "label": "1"}] * 4 + [{"prompt": "long " * 50, "label": "1"}] * 3 + [{"text": "none"}]
    executor = await start(make_args(rows, max_prompt_length=40, skip_bad_rows=True), ScriptedEngine())
    assert (await executor.get(0)).metrics["rollout/prompts_left_out"] == 4
    whole = await start(make_args(4), ScriptedEngine())
    assert "rollout/prompts_left_out" not in (await whole.get(0)).metrics


async def test_unscored_samples_are_counted_and_kept_out(make_args: MakeArgs, start: Start) -> None:
    rows = [{"prompt": f"question {number}", "label": [1.0, None]} for number in range(4)]
    executor = await start(make_args(rows, reward="tests.rollout.plugs.by_label"), ScriptedEngine())
    ref = await executor.get(0)
    assert ref.metrics["rollout/unscored"] == 2
    assert ref.metrics["rollout/reward"] == 1.0
    assert np.isnan(share_of(executor, ref).data.rewards).tolist() == [False, True, False, True]


async def test_samples_are_written_for_readers(make_args: MakeArgs, start: Start) -> None:
    args = make_args(save_samples=3)
    executor = await start(args, ScriptedEngine())
    await executor.get(0)
    lines = list(read(Path(args.run_dir) / "samples" / "rollout_0.jsonl"))
    assert len(lines) == 3
    assert "question 0" in lines[0]["prompt"]
    assert {"response", "reward", "label", "versions"} <= lines[0].keys()
