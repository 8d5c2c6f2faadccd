"""gsm8k, dapo and think_format: verifiers of one fixed form."""

import pytest

from miles.rewards import dapo, gsm8k, think_format

SOLUTION = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nTogether 48+24 = 72.\n#### 72"


@pytest.mark.parametrize(
    ("response", "label", "wanted"),
    [
        (SOLUTION, SOLUTION, 1.0),
        ("72", SOLUTION, 1.0),
        ("so 72 in all", "72", 1.0),
        ("#### 72", 72, 1.0),
        ("#### 71\n#### 72\nDone, all 5 of them.", "72", 1.0),
        ("####72", "72", 1.0),
        ("#### $1,072.00", "#### 1,072", 1.0),
        ("#### -3", "-3", 1.0),
        ("#### -3", "3", 0.0),
        ("it is 72\n#### no idea", "72", 0.0),
        ("it is 72\n####", "72", 0.0),
        ("72 or 73", "72", 0.0),
        ("", "72", 0.0),
        ("<think>#### 72</think> 5", "72", 0.0),
        ("72", "", None),
        ("72", "none", None),
        ("72", None, None),
        ("72", "in words: #### seventy-two", None),
    ],
)
def test_gsm8k(answer, response, label, wanted):
    assert gsm8k.score(answer(response, label)) == wanted


@pytest.mark.parametrize(
    ("response", "label", "wanted"),
    [
        ("So.\nAnswer: 34", "34", (1.0, 1.0)),
        ("Answer: 1\nno, wait\nANSWER : $34$.", "34", (1.0, 1.0)),
        ("**Answer:** 34", "34", (1.0, 1.0)),
        (r"Answer: $\boxed{34}$", "34", (1.0, 1.0)),
        (r"Answer: \frac{1}{2}", "0.5", (1.0, 1.0)),
        ("Answer: 34\nAnswer: 35", "34", (-1.0, 1.0)),
        ("34", "34", (-1.0, 0.0)),
        (r"\boxed{34}", "34", (-1.0, 0.0)),
        ("Answer:", "34", (-1.0, 0.0)),
        ("<think>Answer: 34</think>", "34", (-1.0, 0.0)),
        ("", "34", (-1.0, 0.0)),
    ],
)
def test_dapo(answer, response, label, wanted):
    reward, marked = wanted
    assert dapo.score(answer(response, label)) == {"reward": reward, "right": (reward + 1) / 2, "marked": marked}


def test_dapo_without_a_label_is_unscorable(answer):
    assert dapo.score(answer("Answer: 3", None)) is None


@pytest.mark.case("C19")
@pytest.mark.parametrize(
    ("response", "wanted"),
    [
        ("<think>2 and 2</think> 4", (1.0, 1.0)),
        ("2 and 2\n</think>\n\n4", (1.0, 1.0)),
        (r"\boxed{42}", (0.0, 0.0)),
        ("<think>2 and 2", (0.0, 0.0)),
        ("<think></think>4", (0.0, 1.0)),
        ("<think>2</think>", (0.0, 1.0)),
        ("<think>2</think>4</think>5", (0.0, 1.0)),
        ("<think>2<think>3</think>4", (0.0, 1.0)),
        ("first <think>2</think>4", (0.0, 1.0)),
        ("", (0.0, 0.0)),
    ],
)
def test_think_format(answer, response, wanted):
    assert think_format.score(answer(response)) == dict(zip(("reward", "marked"), wanted, strict=True))
