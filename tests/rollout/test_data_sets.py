"""Several data sets, their rewards and curricula, through the executor."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.rollout.scripted_engine import ScriptedEngine
from tests.rollout.small_run import MakeArgs, Start, write_rows


def two_sets(folder: Path) -> dict[str, str]:
    return {
        name: write_rows(folder / f"{name}.jsonl", [{"prompt": f"{name} {place}", "label": label} for place in range(4)])
        for name, label in (("easy", 1.0), ("hard", 0.25))
    }


async def test_each_set_has_its_reward_and_its_curve(make_args: MakeArgs, start: Start, tmp_path: Path) -> None:
    args = make_args(
        prompt_data=two_sets(tmp_path), prompt_weights={"easy": 1.0, "hard": 3.0}, rollout_batch_size=8,
        reward="tests.rollout.plugs.by_label", reward_by_set={"hard": "tests.rollout.plugs.by_label=-2"}, save_samples=16,
    )  # fmt: skip
    executor = await start(args, ScriptedEngine())
    metrics = (await executor.get(0)).metrics
    assert metrics["rollout/reward/easy"] == 1.0
    assert metrics["rollout/reward/hard"] == -0.5
    assert metrics["rollout/reward"] == pytest.approx((2 * 1.0 + 6 * -0.5) / 8)
    written = (tmp_path / "runs" / "run" / "samples" / "rollout_0.jsonl").read_text()
    assert (written.count('"data_set": "easy"'), written.count('"data_set": "hard"')) == (4, 12)


@pytest.mark.parametrize("fully_async", [False, True])
async def test_a_curriculum_learns_also_from_groups_that_the_filter_refuses(make_args: MakeArgs, start: Start, fully_async: bool) -> None:
    rows = [{"prompt": f"p{place}", "label": label} for place, label in enumerate([0.0, 0.5, [0.0, 0.5], 1.0])]
    args = make_args(
        rows, reward="tests.rollout.plugs.by_label", curriculum="pass_rate", rollout_batch_size=1, fully_async=fully_async,
        group_filter="reward_spread", num_rollout=1, max_concurrent_groups=1,
    )  # fmt: skip
    executor = await start(args, ScriptedEngine())
    await executor.get(0)
    learnt = executor.data.state()["pass_rates"]
    assert {row: rate for row, (_, rate) in learnt.items()} == {"0": 0.0, "1": 0.5, "2": 0.25}
    assert executor.data.draw(4).prompt_index == 3, "never scored"
    assert [executor.data.draw(4 + place).prompt_index for place in (1, 2, 3)] == [1, 2, 0]


@pytest.mark.case("C19")
@pytest.mark.parametrize(("reward", "told"), [("think_format", True), ("exact=1,think_format=1", True), ("dapo", True), ("exact", False)])
async def test_a_rollout_without_the_marker_that_its_reward_wants_is_told(
    make_args: MakeArgs, start: Start, caplog: pytest.LogCaptureFixture, reward: str, told: bool
) -> None:
    executor = await start(make_args(reward=reward, reward_workers=0), ScriptedEngine())
    with caplog.at_level(logging.WARNING):
        await executor.get(0)
    assert ("no answer has the marker" in caplog.text) == told


async def test_failed_rewards_are_counted(make_args: MakeArgs, start: Start) -> None:
    executor = await start(make_args(reward="tests.rollout.plugs.raises", reward_failure="exclude"), ScriptedEngine())
    metrics = (await executor.get(0)).metrics
    assert (metrics["rollout/reward_failed"], metrics["rollout/unscored"]) == (4.0, 4.0)
    assert "rollout/reward" not in metrics
