from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from miles.ray.wiring import engine_specs
from miles.rollout.evaluate import pass_at, pass_at_k, set_metrics
from miles.types import Completion, GenerateRequest, PromptGroup, Sample
from tests.rollout.scripted_engine import ScriptedEngine
from tests.rollout.small_run import MakeArgs, Start, write_rows


def item(*rewards: float | None) -> PromptGroup:
    return PromptGroup(0, 0, 0, [Sample(place, 0, "", [1], reward=reward) for place, reward in enumerate(rewards)])


def sets(tmp_path: Path, **labels: list[Any]) -> dict[str, str]:
    return {
        name: write_rows(tmp_path / f"{name}.jsonl", [{"prompt": f"{name} {place}", "label": label} for place, label in enumerate(values)])
        for name, values in labels.items()
    }


@pytest.mark.case("C73")
def test_pass_at_k_is_unbiased_per_prompt_and_then_averaged() -> None:
    assert [pass_at_k(4, 1, k) for k in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert [round(pass_at_k(8, 3, k) or 0, 6) for k in (1, 2, 4, 8)] == [0.375, 0.642857, 0.928571, 1.0]
    assert pass_at_k(2, 0, 2) == 0.0
    assert pass_at_k(2, 0, 5) is None
    assert pass_at_k(4, 4, 8) is None
    assert pass_at([[1, 0, 0, 0], [1, 1, 1, 1]], 4) == {1: 0.625, 2: 0.75, 4: 1.0}
    assert pass_at([[1, 0], [0, 0, 0, 0]], 4) == {1: 0.25, 2: 0.5, 4: 0.0}, "a prompt with two samples says nothing of four"
    assert pass_at([[1.0, 0.0]], 1) == {1: 0.5}
    assert pass_at([[1.0 - 1e-7, 0.9, 0.5, 2.0]], 1) == {1: 0.5}, "partly right is not solved, rounding is"


@pytest.mark.case("C71")
def test_means_are_weighted_by_item() -> None:
    metrics = set_metrics("sums", [item(1), item(1), item(1), item(1), item(0)], 1)
    assert metrics["eval/sums/reward"] == 0.8
    assert metrics["eval/sums/count"] == 5
    metrics = set_metrics("sums", [item(1, None, None, None), item(0, 0, 0, 0), item(None, None)], 4)
    assert metrics["eval/sums/reward"] == 0.5
    assert metrics["eval/sums/count"] == 2
    assert metrics["eval/sums/unscored"] == 5
    assert set_metrics("sums", [item(None)], 1) == {
        "eval/sums/count": 0, "eval/sums/unscored": 1, "eval/sums/response_length": 0, "eval/sums/truncated_share": 0,
    }  # fmt: skip


@pytest.mark.case("C71")
async def test_every_item_of_every_set_counts_once(make_args: MakeArgs, start: Start, tmp_path: Path) -> None:
    data = sets(tmp_path, five=[1, 1, 1, 1, 0], three=[0.5, 0.5, 0.5])
    engines = [ScriptedEngine(), ScriptedEngine()]
    executor = await start(make_args(eval_data=data, reward="tests.rollout.plugs.by_label"), *engines, version=3)
    result = await executor.eval(7)
    assert result.reason is None
    assert (result.rollout_id, result.weight_version) == (7, 3)
    assert result.metrics["eval/five/reward"] == pytest.approx(0.8)
    assert result.metrics["eval/five/count"] == 5
    assert result.metrics["eval/three/reward"] == 0.5
    assert result.metrics["eval/three/count"] == 3
    assert all(request.wave is not None for engine in engines for request in engine.requests)
    assert {request.sampling.temperature for engine in engines for request in engine.requests} == {0.0}
    assert (await executor.eval(7)).metrics == result.metrics


async def test_evaluation_has_its_own_sampling_reward_and_seeds(make_args: MakeArgs, start: Start, tmp_path: Path) -> None:
    engine = ScriptedEngine()
    args = make_args(
        eval_data=sets(tmp_path, a=[1, 2], b=[1, 2]), eval_reward="tests.rollout.plugs.by_place", eval_samples_per_prompt=4,
        eval_temperature=0.7, eval_top_p=0.9, eval_max_response_length=9, top_k=5, reward="tests.rollout.plugs.raises",
    )  # fmt: skip
    executor = await start(args, engine)
    result = await executor.eval(0)
    assert result.metrics["eval/a/reward"] == 0.5
    assert result.metrics["eval/a/pass@1"] == 0.5
    assert result.metrics["eval/a/pass@4"] == 1.0
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_new_tokens) == (0.7, 0.9, 0, 9)
    seeds = [request.sampling.seed for request in engine.requests]
    assert len(set(seeds)) == 16


async def test_a_set_that_fails_costs_its_point_and_not_the_run(make_args: MakeArgs, start: Start, tmp_path: Path) -> None:
    data = sets(tmp_path, good=[1, 0], poisoned=[1, 1, 1], unscorable=["x"])

    def answer(request: GenerateRequest) -> Completion | Exception | None:
        return ValueError("400: too long") if "poisoned" in request.request_id and "-g1." in request.request_id else None

    executor = await start(make_args(eval_data=data, reward="tests.rollout.plugs.by_label"), ScriptedEngine(answer))
    result = await executor.eval(0)
    assert result.metrics["eval/good/reward"] == 0.5
    assert result.metrics["eval/poisoned/count"] == 2
    assert result.metrics["eval/poisoned/failed"] == 1
    assert "eval/unscorable/reward" not in result.metrics
    assert "poisoned: 1 of 3 prompts failed, the first: ValueError: 400: too long" in (result.reason or "")
    assert "unscorable: crashed: RewardError" in (result.reason or "")
    await executor.get(0)


async def test_an_evaluation_that_hangs_is_ended_with_its_reason(make_args: MakeArgs, start: Start, tmp_path: Path) -> None:
    engine = ScriptedEngine(hold=True)
    executor = await start(make_args(eval_data=sets(tmp_path, a=[1]), eval_timeout=0.05), engine)
    result = await asyncio.wait_for(executor.eval(0), 5)
    assert result.reason == "a: not done within --eval-timeout 0.05 s"
    assert engine.running == 0


async def test_an_evaluation_may_take_longer_than_a_training_sample(make_args: MakeArgs, start: Start, tmp_path: Path) -> None:
    engine = ScriptedEngine(hold=True)
    args = make_args(eval_data=sets(tmp_path, a=[1]), sample_timeout=0.05, group_retries=0, reward="tests.rollout.plugs.by_label")
    executor = await start(args, engine)
    evaluating = asyncio.ensure_future(executor.eval(0))
    await asyncio.sleep(0.2)
    assert engine.release_all() == 1
    result = await asyncio.wait_for(evaluating, 5)
    assert result.reason is None
    assert result.metrics["eval/a/count"] == 1
    (engine_spec,) = engine_specs(args)
    assert engine_spec.limits["generate"] == (args.eval_timeout + 30, "--eval-timeout")


async def test_answers_under_two_versions_are_said_to_be(make_args: MakeArgs, start: Start, tmp_path: Path) -> None:
    engines = [ScriptedEngine(), ScriptedEngine()]
    executor = await start(make_args(eval_data=sets(tmp_path, a=[1, 1]), reward="tests.rollout.plugs.by_label"), *engines, version=2)
    engines[1].version = 3
    assert (await executor.eval(0)).reason == "a: answered under several weight versions [2, 3]"


async def test_snapshot_mode_hands_the_checkpoint_to_the_users_evaluator(make_args: MakeArgs, start: Start) -> None:
    args = make_args(eval_mode="snapshot", eval_function="tests.rollout.plugs.evaluate_snapshot")
    engine = ScriptedEngine()
    executor = await start(args, engine)
    result = await executor.eval(4, "/models/step4")
    assert result.metrics == {"eval/length": 13.0, "eval/mine/score": 4.0}
    assert (await executor.eval(4, None)).reason == "eval_function: crashed: TypeError: object of type 'NoneType' has no len()"
    assert not engine.requests


async def test_without_sets_there_is_a_reason(make_args: MakeArgs, start: Start) -> None:
    executor = await start(make_args(), ScriptedEngine())
    assert (await executor.eval(0)).reason == "no --eval-data"
    await executor.report_eval_skip(3, "busy")


async def test_a_broken_set_ends_the_start(make_args: MakeArgs, start: Start, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 2"):
        await start(make_args(eval_data={"bad": str(tmp_path / "bad.jsonl")}), ScriptedEngine())
