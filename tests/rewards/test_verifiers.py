import sys

import pytest
import reasoning_gym

from miles.config.reward import RewardSection
from miles.rewards import exact, f1, last_number
from miles.rewards import reasoning_gym as gym
from miles.rewards.reward import RewardScorer


@pytest.mark.parametrize(
    ("response", "label", "wanted"),
    [
        ("4", "4", 1.0),
        (" 4\n", "4", 1.0),
        ("4.", "4", 0.0),
        ("", "4", 0.0),
        ("4", 4, 1.0),
        ("", "", None),
        ("x", None, None),
        ("0", 0, 1.0),
    ],
)
def test_exact(answer, response, label, wanted):
    assert exact.score(answer(response, label)) == wanted


@pytest.mark.parametrize(
    ("response", "label", "wanted"),
    [
        ("It is 12 + 3 = 15", "15", 1.0),
        ("It is 15, since 12 + 3", "15", 0.0),
        ("1,234", "1234", 1.0),
        ("1234", "1,234", 1.0),
        ("$1,234.50.", "1234.5", 1.0),
        ("**-3**", "-3", 1.0),
        ("-3", "3", 0.0),
        ("−3", "-3", 1.0),
        ("10-3", "3", 1.0),
        ("10 - 3", "3", 1.0),
        ("(2)-3", "3", 1.0),
        ("007", "7", 1.0),
        ("3.50", "3.5", 1.0),
        ("3.", "3", 1.0),
        (".5", "0.5", 1.0),
        ("1, 2, 3", "3", 1.0),
        ("none", "3", 0.0),
        ("", "3", 0.0),
        ("3", "three", None),
        ("3", None, None),
        ("3", 3, 1.0),
        ("9" * 400, "9" * 400, 1.0),
        ("8,000", "0", 0.0),
    ],
)
def test_last_number(answer, response, label, wanted):
    assert last_number.score(answer(response, label)) == wanted


@pytest.mark.parametrize(
    ("response", "label", "wanted"),
    [
        ("The cat!", "a cat", 1.0),
        ("cat", "cat sat", 2 / 3),
        ("cat cat", "cat", 2 / 3),
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
        ("cat", ["dog", "the cat"], 1.0),
        ("the", "the", 1.0),
        ("cat", "", None),
        ("cat", None, None),
        ("cat", [], None),
        ("4", 4, 1.0),
    ],
)
def test_f1(answer, response, label, wanted):
    assert f1.score(answer(response, label)) == (None if wanted is None else pytest.approx(wanted))


@pytest.mark.parametrize("task", ["chain_sum", "countdown", "basic_arithmetic"])
@pytest.mark.parametrize("form", ["{}", "The answer is {}.", r"So \boxed{{{}}}", "<think>1</think><answer>{}</answer>"])
async def test_reasoning_gym_scores_its_own_answers(scorer, answer, task, form):
    each = scorer("reasoning_gym", reward_workers=0)
    for entry in reasoning_gym.create_dataset(task, size=3, seed=5):
        right = answer(form.format(entry["answer"]), entry["answer"], metadata=entry["metadata"])
        wrong = answer(form.format("-123456"), entry["answer"], metadata=entry["metadata"])
        await each.score(right)
        await each.score(wrong)
        assert right.reward == 1.0
        assert wrong.reward < 0.2


def test_reasoning_gym_needs_its_metadata_and_its_package(answer, monkeypatch):
    assert gym.ReasoningGym(None)(answer("4")) is None
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r"miles\[gym\]"):
        RewardScorer(RewardSection(reward="reasoning_gym", reward_workers=0))
