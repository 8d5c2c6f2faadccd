import pytest

from miles.rewards.multiple_choice import choice, score


@pytest.mark.case("C11")
@pytest.mark.parametrize(
    "response",
    [
        "Actually this one is tricky, I am unsure",
        "Error: rate limited",
        "I cannot determine the answer.",
        "",
        "A",
        "A cat sat. B is not it either, nor C.",
        "The answer is a matter of taste.",
        "The answer is Apple.",
        "Answer: All of them",
        "The answer is A's problem",
        r"\boxed{} A",
        r"\boxed{AB}",
        r"The answer is B, or \boxed{A",
        "My choice: I would rather not",
    ],
)
def test_a_letter_counts_only_where_it_is_stated(answer, response):
    wanted = 1.0 if response == "A" else 0.0
    assert score(answer(response, "A")) == wanted


@pytest.mark.case("C11")
@pytest.mark.parametrize("letter", "ABCD")
@pytest.mark.parametrize(
    "form",
    [
        "Answer: ({})",
        "Answer: {}",
        "answer: {}.",
        "The answer is {}.",
        "The correct answer is ({}) because A is wrong",
        "**Answer:** {}",
        "**Answer: {}**",
        r"\boxed{{{}}}",
        r"\boxed{{\text{{({})}}}}",
        "({})",
        "{}.",
        "Answer: A. No, wait. Answer: {}",
        "<think>Answer: B</think>Answer: {}",
        "It is hot, so\n{}",
        "The final choice is option {}",
    ],
)
def test_stated_choices_are_read(answer, letter, form):
    response = form.format(letter)
    assert choice(response) == letter
    assert [score(answer(response, label)) for label in "ABCD"] == [float(label == letter) for label in "ABCD"]


@pytest.mark.parametrize("label", [None, "", "AB", "4", "answer"])
def test_a_label_that_is_no_letter_is_unscorable(answer, label):
    assert score(answer("Answer: A", label)) is None
