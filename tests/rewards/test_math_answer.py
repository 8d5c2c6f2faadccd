import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.rewards.call import BUILTIN
from miles.rewards.math_answer import grade, last_box, tidy
from miles.rewards.reward import RewardScorer

MATH_LIKE = ["math", "last_number", "gsm8k", "dapo"]


def table(text: str) -> list[tuple[str, str, float]]:
    """Lines of `response | label | score`."""
    rows = [line.rsplit(" | ", 2) for line in text.strip().splitlines()]
    return [(response.strip(), label.strip(), float(wanted)) for response, label, wanted in rows]


def boxed(text: str) -> list[tuple[str, str, float]]:
    """Lines of `answer | label | score`, the answer in a box in a sentence."""
    return [(f"So the answer is $\\boxed{{{answer}}}$.", label, wanted) for answer, label, wanted in table(text)]


@pytest.mark.case("C01")
@pytest.mark.parametrize("reward", MATH_LIKE)
@pytest.mark.parametrize("around", ["Answer: {}", "{}", "${}$", "<think>9</think> {}", "The value is {}.\n", r"\[ {} \]"])
async def test_every_math_like_type_reads_a_box(scorer, answer, reward, around):
    if reward == "dapo":
        around = f"Answer: {around}".replace("Answer: Answer: ", "Answer: ").replace("<think>9</think> ", "")
    for box in [r"\boxed{5}", r"\fbox{5}", r"\boxed{ 5 }", r"\boxed{5.0}"]:
        right, wrong = answer(around.format(box), "5"), answer(around.format(box), "6")
        each = scorer(reward, reward_workers=0)
        await each.score(right)
        await each.score(wrong)
        assert (right.reward, wrong.reward) == (1.0, -1.0 if reward == "dapo" else 0.0), box


def test_math_like_types_are_built_in():
    assert set(MATH_LIKE) <= set(BUILTIN)
    assert RewardScorer.__name__


@pytest.mark.case("C03")
@pytest.mark.parametrize(
    ("response", "label", "wanted"),
    table(r"""
\boxed{\frac{\sqrt{3}}{2}} | \frac{\sqrt{3}}{2} | 1
\boxed{2}. wait, \boxed{3} | 3 | 1
\boxed{2}. wait, \boxed{3} | 2 | 0
\boxed{3} and so \boxed{2 | 3 | 0
\boxed{\frac{1}{2} | \frac{1}{2} | 0
\boxed{\frac{1}{2}} | \boxed{\frac{1}{2}} | 1
\boxed{} | 5 | 0
I know it is 5, \boxed{} | 5 | 0
\boxed{ | 5 | 0
\boxed | 5 | 0
\boxed{5 | 5 | 0
}}}{{{\boxed{5}}} | 5 | 1
\fbox{42} | 42 | 1
\fbox{\boxed{42}} | 42 | 1
\boxed{\boxed{7}} | 7 | 1
\boxed{\{1, 2\}} | \{1,2\} | 1
\boxed 5 | 5 | 1
"""),
)
def test_boxes(response, label, wanted):
    assert grade(response, label) == wanted


@pytest.mark.case("C05")
@pytest.mark.parametrize(
    ("response", "label", "wanted"),
    boxed(r"""
1,000 | 1000 | 1
$9{,}500 | 9500 | 1
8,000 | 8000 | 1
\$1,234.00 | 1234 | 1
1234 | 1,234 | 1
1,234,567 | 1234567 | 1
-1,000 | -1000 | 1
1\,000 | 1000 | 1
12{,}345.5 | 12345.5 | 1
\text{8,000} | 8000 | 1
8,000 | 0 | 0
8,000 | 8 | 0
9,500 | 500 | 0
1,000 | 1 | 0
10,00 | 1000 | 0
"""),
)
def test_thousands(response, label, wanted):
    assert grade(response, label) == wanted


@pytest.mark.case("C07")
@pytest.mark.parametrize(
    ("response", "label", "wanted"),
    boxed(r"""
[1,2] | (1,2) | 0
(1,2] | (1,2) | 0
[1,2) | (1,2] | 0
(1,2) | [1,2] | 0
(1,2) | (1,2) | 1
(1, 2) | (1,2) | 1
\left(1, 2\right) | (1,2) | 1
[0,\infty) | [0,\infty) | 1
[0,\infty) | (0,\infty) | 0
(-\infty,1)\cup(2,3] | (-\infty, 1) \cup (2, 3] | 1
(-\infty,1)\cup(2,3] | (-\infty,1)\cup(2,3) | 0
(2,1) | (1,2) | 0
\{1,2\} | (1,2) | 0
(1,2,3) | (1,2) | 0
"""),
)
def test_brackets_are_part_of_an_answer(response, label, wanted):
    assert grade(response, label) == wanted


@pytest.mark.case("C09")
@pytest.mark.parametrize(
    ("response", "label", "wanted"),
    boxed(r"""
\frac{1}{2004!} | \frac{1}{2006!} | 0
\frac{1}{2004!} | \frac{1}{2004!} | 1
\frac{2}{2 \cdot 2004!} | \frac{1}{2004!} | 1
\frac{1}{2^{99}} | \frac{1}{2^{98}} | 0
\frac{2}{2^{99}} | \frac{1}{2^{98}} | 1
10^{-99} | 10^{-98} | 0
0.0000001 | 0.0000002 | 0
0.0001 | 0.0001004 | 0
(1, 10^{-99}) | (1, 10^{-98}) | 0
\{1, 10^{-99}\} | \{1, 10^{-98}\} | 0
x = 10^{-99} | x = 10^{-98} | 0
\pm 2021 | 2021 | 0
2021 | \pm 2021 | 0
\pm 2021 | \{2021, -2021\} | 1
\pm 2021 | \pm 2021 | 1
\pm 2021 | \pm 2022 | 0
\pm 2021 | 2021, -2021 | 1
1 2 | 12 | 0
1+\frac{1}{e} | 1-\frac{1}{e} | 0
-3 | 3 | 0
4\sqrt{2} | 4 | 0
4\sqrt{2} | \sqrt{2} | 0
5x | 5 | 0
(0,1.5) | (0,1) | 0
1:00 | 12:00 | 0
2:00 | 3:00 | 0
1:00 | 1:00 | 1
1.0000001 | 1 | 0
100000001 | 100000000 | 0
-\infty | \infty | 0
"""),
)
def test_near_is_not_equal(response, label, wanted):
    assert grade(response, label) == wanted


@pytest.mark.case("C13")
@pytest.mark.parametrize(
    ("response", "label", "wanted"),
    boxed(r"""
\sqrt[3]{8} | 2 | 1
\sqrt[3]2 | \sqrt[3]{2} | 1
\sqrt[3]2 | \sqrt{2} | 0
\sqrt2 | \sqrt{2} | 1
\sqrt[4]{16} | 2 | 1
\frac12 | \frac{1}{2} | 1
\frac1{2} | \frac{1}{2} | 1
\frac{1}2 | \frac{1}{2} | 1
\dfrac{1}{2} | 0.5 | 1
\tfrac12 | 0.5 | 1
2/3 | \frac{2}{3} | 1
-\frac{1}{2} | \frac{-1}{2} | 1
\frac{\sqrt2}{2} | \frac{\sqrt{2}}{2} | 1
\left(3,\frac{\pi}{2}\right) | (3,\frac{\pi}{2}) | 1
3\frac{1}{2} | \frac72 | 1
50\% | 0.5 | 1
12\text{ cm} | 12 | 1
90^\circ | 90 | 1
(x+1)^2 | x^2+2x+1 | 1
x=5 | 5 | 1
2,1 | 1,2 | 1
\text{Evelyn} | \text{Evelyn} | 1
\text{even} | \text{odd} | 0
Tuesday | Wednesday | 0
yadseuT | Tuesday | 0
\text{(C)} | C | 1
\text{(C)} | D | 0
0.333333 | \frac13 | 1
0.33 | \frac13 | 0
\frac12 | 12 | 0
(3,\frac{2\pi}{3}) | (3,\frac{\pi}{2}) | 0
1 \pm \sqrt{2} | 1+\sqrt{2}, 1-\sqrt{2} | 1
x = \frac{-1 \pm \sqrt{5}}{2} | \frac{-1+\sqrt5}{2},\frac{-1-\sqrt5}{2} | 1
x = \frac{-1 \pm \sqrt{5}}{2} | \frac{-1+\sqrt5}{2} | 0
1 1/2 | 1.5 | 1
1 \frac12 | 1.5 | 1
11/2 | 1 1/2 | 0
5 dollars | 5 | 1
5 apples | \$5 | 1
3 sin x | 3 | 0
x>1 | (1,\infty) | 1
x \ge 3 | x>3 | 0
\varnothing | \emptyset | 1
y=x+1 | x-y+1=0 | 1
y=x+1 | y=x+2 | 0
y=5 | x=5 | 0
3:4 | 6:8 | 1
2x | x^2 | 0
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}1\\2\end{pmatrix} | 1
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}1\\3\end{pmatrix} | 0
"""),
)
def test_ways_to_write_an_answer(response, label, wanted):
    assert grade(response, label) == wanted


@pytest.mark.parametrize(
    ("response", "label", "wanted"),
    boxed(r"""
6e3 | 6000 | 1
6000 | 6e3 | 1
6E3 | 6000 | 1
-2.5e-2 | -0.025 | 1
6e3 | 60000 | 0
2e | 2e | 1
e^{i\pi} | -1 | 1
-1 | e^{i \pi} | 1
e^{i\pi/2} | i | 1
2e^{\pi i/2} | 2i | 1
2e^{i\pi/2} | -2i | 0
e^{i\pi/3} | \frac{1+i\sqrt{3}}{2} | 1
e^{i\pi/3} | \frac{1-i\sqrt{3}}{2} | 0
i^2 | i^2 | 1
1,2 | (1,2) | 0
(1, 2) | 1, 2 | 0
1,2 | 2,1 | 1
1,2 | \{2,1\} | 1
1+\sqrt{2}, 1-\sqrt{2} | \{1-\sqrt{2},1+\sqrt{2}\} | 1
(1,2),(3,4) | (3,4),(1,2) | 1
x=1,y=2 | (1,2) | 1
6.02e23 | 6.02\times 10^{23} | 1
6.02e23 | 6.03\times 10^{23} | 0
6 \cdot 10^3 | 6e3 | 1
3\times 10^{-3} | 0.003 | 1
3\times 10^{-3} | 0.03 | 0
x^2+y^2-1=0 | x^2+y^2=1 | 1
x+1=y | y=x+1 | 1
2y=2x+2 | y=x+1 | 1
y=x | y=-x | 0
5=x | 5 | 1
5=x | 6 | 0
x=\frac{1}{2^{99}} | x=\frac{1}{2^{98}} | 0
x=0.0000001 | 0.0000002 | 0
y=10^{-7}x | y=3\cdot 10^{-7}x | 0
"""),
)
def test_exponents_the_imaginary_unit_and_lists(response, label, wanted):
    assert grade(response, label) == wanted


@pytest.mark.parametrize("answer", ["6e3", "x+1=y", "1,2", r"e^{i\pi}", r"\frac12", "(1,2]", "x=5"])
def test_a_response_that_is_nothing_but_its_answer_needs_no_mark(answer):
    assert grade(answer, answer) == 1.0
    assert grade(f"<think>9</think>\n{answer}\n", answer) == 1.0
    assert grade(answer, "17") == 0.0


@pytest.mark.case("C15")
@pytest.mark.parametrize("label", ["", " ", r"\frac{", "n/a", "N/A", "None", None, "$$", r"\boxed{}", r"\boxed{\frac{", "####", "?", "}{"])
@pytest.mark.parametrize("response", ["", r"\boxed{5}", r"\boxed{}", r"\boxed{n/a}", r"\boxed{\frac{}", "n/a", "None", r"\frac{"])
def test_a_label_that_cannot_be_read_is_unscorable(response, label):
    assert grade(response, label) is None


@pytest.mark.case("C15")
@pytest.mark.parametrize("reward", MATH_LIKE)
@pytest.mark.parametrize("label", ["", r"\frac{", "n/a", None])
async def test_no_math_like_type_gives_points_without_a_label(scorer, answer, reward, label):
    each = scorer(reward, reward_workers=0)
    for response in ["", r"\boxed{5}", r"\boxed{}", "Answer: n/a", f"Answer: {label}", str(label)]:
        sample = answer(response, label)
        await each.score(sample)
        assert sample.reward is None
    assert each.num_unscored == 6


@pytest.mark.case("C15")
async def test_the_unscorable_are_counted(scorer, answer):
    each = scorer("math", reward_workers=0)
    samples = [answer(r"\boxed{5}", label) for label in ["5", "", "n/a", "6"]]
    for sample in samples:
        await each.score(sample)
    assert [sample.reward for sample in samples] == [1.0, None, None, 0.0]
    assert each.num_unscored == 2


@pytest.mark.parametrize("response", ["", " ", "no idea", "\\", "$", "$$", "{", r"\boxed{\boxed{", "\x00", "####", "é" * 5000, "</think>"])
def test_no_answer_is_wrong_and_raises_nothing(response):
    assert grade(response, "5") == 0.0


@pytest.mark.case("C19")
@pytest.mark.parametrize(
    ("response", "label", "wanted"),
    [
        (r"reason \boxed{1}###Response\boxed{2}###Response\boxed{42}", "42", 1.0),
        (r"reason \boxed{1}###Response\boxed{2}###Response\boxed{42}", "2", 0.0),
        (r"<think>\boxed{1}</think>\boxed{2}</think>\boxed{42}", "42", 1.0),
        (r"<think>\boxed{42}</think>I give up", "42", 0.0),
        (r"\boxed{42}", "42", 1.0),
        ("#### 1\n#### 42", "42", 1.0),
        ("#### 42\nDone.", "42", 1.0),
    ],
)
def test_what_follows_the_last_marker_is_graded(response, label, wanted):
    assert grade(response, label) == wanted


@pytest.mark.parametrize(
    ("response", "label", "wanted"),
    [
        ("The answer is 7.", "7", 1.0),
        ("The answer is 7.", "8", 0.0),
        ("We get $x = \\frac{1}{2}$", "0.5", 1.0),
        ("We get $x = \\frac{1}{2}$", "1", 0.0),
        ("7", "7", 1.0),
        ("the answer is 72 apples", "Natalia sold 48/2 = 24 clips.\n#### 72", 1.0),
        ("7 it is", 7, 1.0),
        ("7 it is", 7.0, 1.0),
    ],
)
def test_an_unmarked_answer_is_found(response, label, wanted):
    assert grade(response, label) == wanted


@pytest.mark.parametrize("evil", ["9^{9^{9^{9}}}", "9^{999999999}", "(10^{10})!!", "99999999!", "1" * 5000, "{" * 3000, r"\frac" * 500])
def test_answers_made_to_hang_the_verifier_are_wrong(evil):
    assert grade(f"\\boxed{{{evil}}}", "5") == 0.0
    assert grade(f"${evil}$", "5") == 0.0


PIECES = [
    r"\frac",
    r"\sqrt",
    "{",
    "}",
    "{",
    "}",
    "1",
    "2",
    "x",
    "+",
    "-",
    "^",
    "_",
    "(",
    ")",
    "[",
    "]",
    ",",
    "=",
    r"\pi",
    r"\infty",
    r"\pm",
]
PIECES += [
    r"\text{",
    ".",
    "0",
    "!",
    "/",
    "<",
    r"\cup",
    r"\{",
    r"\}",
    r"\%",
    ":",
    " ",
    "e",
    "i",
    r"\left(",
    "&",
    "|",
    r"\\",
    "°",
    "$",
    "\n",
    "∞",
]


@settings(max_examples=150, deadline=None)
@given(answer=st.lists(st.sampled_from(PIECES), max_size=9).map("".join), form=st.sampled_from(["\\boxed{%s}", "%s", "#### %s"]))
def test_anything_a_model_may_write_gets_a_score(answer, form):
    assert grade(form % answer, "5") in (0.0, 1.0)
    assert grade("\\boxed{5}", answer) in (0.0, 1.0, None)


def test_last_box_and_tidy():
    assert last_box(r"a \boxed{x_{1}} b \boxed{\text{a \} b}} c") == r"\text{a \} b}"
    assert tidy(r"\dfrac12") == r"\frac{1}{2}"
    assert tidy("(1,000)") == "(1,000)"
