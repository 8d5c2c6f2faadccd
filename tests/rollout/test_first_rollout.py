"""--verify-first-step in the executor: ids, sampling and gold answers, and the faults in them."""

from __future__ import annotations

from typing import Any

import pytest

from miles.protocols import FirstStepWrong
from miles.rollout.context import train_sampling
from tests.rollout.scripted_engine import ScriptedEngine
from tests.rollout.small_run import MakeArgs, Start


async def first(make_args: MakeArgs, start: Start, rows: Any = 8, **settings: Any) -> dict[str, float]:
    executor = await start(make_args(rows, verify_first_step=True, **settings), ScriptedEngine())
    metrics = (await executor.get(0)).metrics
    assert "verify/tokens_as_written" not in (await executor.get(1)).metrics
    return metrics


@pytest.mark.parametrize("fully_async", [False, True])
async def test_what_engines_wrote_is_what_is_trained(make_args: MakeArgs, start: Start, fully_async: bool) -> None:
    metrics = await first(make_args, start, fully_async=fully_async)
    assert metrics["verify/tokens_as_written"] > 4
    assert "verify/gold_answers" not in metrics, "a reward of one's own says nothing of labels"


async def test_retokenised_ids_are_found(make_args: MakeArgs, start: Start) -> None:
    with pytest.raises(FirstStepWrong, match=r"tokenisation: trained token 0 of sample \d+ has id .* the engine wrote id"):
        await first(make_args, start, generate_function="tests.rollout.plugs.retokenised")


async def test_a_prompt_that_was_sent_otherwise_is_found(make_args: MakeArgs, start: Start) -> None:
    with pytest.raises(FirstStepWrong, match=r"tokenisation: .*request 0 was sent id \d+ at place 0 where \d+ is trained on"):
        await first(make_args, start, generate_function="tests.rollout.plugs.sends_other_ids")


async def test_another_temperature_is_found(make_args: MakeArgs, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "miles.rollout.rollout_executor.train_sampling", lambda args: train_sampling(args.model_copy(update={"temperature": 0.5}))
    )
    with pytest.raises(FirstStepWrong, match=r"sampling filter: sample \d+ was asked for with temperature 0.5"):
        await first(make_args, start)


GOLD: dict[str, list[Any]] = {
    "math": ["42", "\\frac{1}{2}", "x^2+1", 7],
    "exact": ["Paris", "a b"],
    "last_number": ["42", 3, "1,000"],
    "f1": ["the cat sat", "Paris"],
    "multiple_choice": ["A", "C"],
}


@pytest.mark.parametrize("reward", GOLD)
async def test_gold_answers_score_1(make_args: MakeArgs, start: Start, reward: str) -> None:
    rows = [{"prompt": f"question {i}: (A) yes (B) no (C) perhaps", "label": label} for i, label in enumerate(GOLD[reward] * 2)]
    metrics = await first(make_args, start, rows, reward=reward, reward_workers=0)
    assert metrics["verify/gold_answers"] == 2


async def test_a_reward_that_refuses_its_own_label_is_found(make_args: MakeArgs, start: Start) -> None:
    rows = [{"prompt": "question", "label": "forty-two"}] * 4
    with pytest.raises(FirstStepWrong, match="reward: --reward last_number gives the label 'forty-two' of prompt 0 itself no score, not 1"):
        await first(make_args, start, rows, reward="last_number", reward_workers=0)
