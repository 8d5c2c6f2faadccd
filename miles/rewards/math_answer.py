r"""math: the answer in the response equals the label, as mathematics. On math-verify, with its known errors mended.

What counts as the answer: the last \boxed{...} or \fbox{...} after the last </think>; without any box what follows
the last "####", else the last expression that math-verify finds. A last box that is empty or never closed is no answer.
"""

from __future__ import annotations

import logging
import re
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy import Basic, Eq, FiniteSet, I, Interval, MatrixBase, Tuple
from sympy.core.relational import Relational

from miles.types import Sample

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits, which need the main thread, are off

ROUND = ("(", ")")
RELATIVE_TOLERANCE = 1e-5
LONGEST_ANSWER = 1000  # characters
LONGEST_BARE = 200  # characters of a response that is nothing but its answer
SEARCHED_TAIL = 2000  # characters of a response without a box
NO_LABEL = frozenset({"", "n/a", "na", "nan", "none", "null", "unknown", "?", "-", "--"})

BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{|\S)")
SHORT_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
SHORT_ROOT = re.compile(r"\\sqrt\s*(\[[^\]]*\])?\s*([0-9a-zA-Z])")
THIN_SPACE = re.compile(r"(?<=\d)\\,(?=\d{3})")
MIXED = re.compile(r"(-?\d+)\s+(?:(\d+)\s*/\s*(\d+)|(\\frac.*))")
UNIT = re.compile(r"(-?[\d.,]*\d)\s+(?!(?:sin|cos|tan|cot|sec|csc|log|exp|sqrt|mod|and|or)\b)[A-Za-z]{3,}(?:\s+[A-Za-z]+)*")
ASSIGNED = re.compile(r"[A-Za-z]\s*=\s*([^=]+)|([^=]+?)\s*=\s*[A-Za-z]")
WRAPPED_NUMBER = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{\s*([-+]?[\d.,]+)\s*\}")
SCIENTIFIC = re.compile(r"[-+]?\d+(?:\.\d+)?[eE][-+]?\d{1,2}")
POWER_OF_TEN = re.compile(r"([-+]?\d+(?:\.\d+)?)\s*\\(?:times|cdot)\s*10\s*\^\s*\{?\s*([-+]?\d{1,2})\s*\}?")
THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)")
CLOCK = re.compile(r"\d+:\d\d(?::\d\d)?")
WORDS = re.compile(r"[A-Za-z][A-Za-z .'-]{3,}")
LETTER = re.compile(r"\(?([A-Z])[).]?")
TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
EULER = re.compile(r"e\^(?:i\b|\{[^{}]*(?<![A-Za-z\\])i(?![A-Za-z]))")
"""e to the power of something with i, which then is the imaginary unit."""
HUGE = re.compile(r"\d\^\(?-?\d+\^|\^\(?-?\d{6,}|\d{6,}\)?!|!\)*!")
"""Towers of powers and the like, which no computer writes out."""


def score(sample: Sample) -> float | None:
    """1.0 when the response's answer equals the label, else 0.0; None when the label is missing or cannot be read."""
    return grade(sample.response, sample.label)


def grade(response: str, label: Any) -> float | None:
    gold = tidy(label_text(label))
    if gold.lower() in NO_LABEL or not readable(gold):
        return None
    answer = answer_in(response)
    if answer is None:
        whole = response.rpartition("</think>")[2].strip()
        bare = len(whole) <= LONGEST_BARE and "\n" not in whole and bool(whole) and equal_text(tidy(whole), gold)
        return float(bare or any(equal(found, gold) for found in _found(response)[:1]))
    answer = tidy(answer)
    return float(bool(answer) and equal_text(answer, gold))


def label_text(label: Any) -> str:
    """A label may be a number, text, a worked solution that ends with "#### 42", or hold a box."""
    text = "" if label is None else str(label)
    if (boxed := last_box(text)) is not None:
        return boxed
    return text.rpartition("####")[2]


def answer_in(response: str) -> str | None:
    """The marked answer; "" for a mark without a usable one; None when nothing is marked."""
    text = response.rpartition("</think>")[2]
    if (boxed := last_box(text)) is not None:
        return boxed
    if "####" in text:
        return text.rpartition("####")[2].strip().split("\n")[0]
    return None


def last_box(text: str) -> str | None:
    r"""Content of the last \boxed or \fbox with balanced braces; "" when it is never closed; None when there is none."""
    marks = list(BOX.finditer(text))
    if not marks:
        return None
    rest = text[marks[-1].end() :]
    if not rest.startswith("{"):
        return re.split(r"[\s$]", rest, maxsplit=1)[0]
    depth = 0
    for place, letter in enumerate(rest):
        if letter in "{}" and rest[place - 1 : place] != "\\":
            depth += 1 if letter == "{" else -1
            if depth == 0:
                inner = rest[1:place]
                return inner if last_box(inner) is None else last_box(inner)
    return ""


def tidy(text: str) -> str:
    """One spelling for what means the same: no money or math signs, no thousands separators, no short fraction and root forms."""
    text = text.strip().replace("−", "-").replace("\\$", "").replace("$", "").replace("\\(", "").replace("\\)", "")
    text = THIN_SPACE.sub("", text.replace("\\varnothing", "\\emptyset"))
    text = text.replace("\\!", "").replace("{,}", ",").replace("\\,", " ").replace("\\ ", " ").replace("\\displaystyle", "")
    text = SHORT_FRACTION.sub(_whole_fraction, text)
    text = SHORT_ROOT.sub(lambda found: f"\\sqrt{found[1] or ''}{{{found[2]}}}", text)
    text = WRAPPED_NUMBER.sub(r"\1", text).strip()
    if mixed := MIXED.fullmatch(text):
        text = mixed[1] + (mixed[4] or f"\\frac{{{mixed[2]}}}{{{mixed[3]}}}")
    if with_unit := UNIT.fullmatch(text):
        text = with_unit[1]
    if not text.endswith(("\\.", "\\right.")):
        text = text.rstrip(".").rstrip()
    if SCIENTIFIC.fullmatch(text):
        return f"{Decimal(text):f}"
    if power := POWER_OF_TEN.fullmatch(text):
        return f"{Decimal(power[1]).scaleb(int(power[2])):f}"
    return text.replace(",", "") if THOUSANDS.fullmatch(text) else text


def _whole_fraction(found: re.Match[str]) -> str:
    above, below = (found[1] if found[1] is not None else found[2]), (found[3] if found[3] is not None else found[4])
    return f"\\frac{{{above}}}{{{below}}}"


def equal_text(answer: str, gold: str) -> bool:
    """Whether two tidy answers mean the same; the cheap and certain ways first."""
    if "=" not in gold and (assigned := ASSIGNED.fullmatch(answer)):
        answer = tidy(assigned[1] or assigned[2])
    if _squeezed(answer) == _squeezed(gold):
        return True
    if (mine := _number(answer)) is not None and (wanted := _number(gold)) is not None:
        return mine == wanted or _rounded(mine, wanted)
    if CLOCK.fullmatch(gold) or CLOCK.fullmatch(answer):
        return False
    outer, outer_wanted = _outer(answer), _outer(gold)
    if outer and outer_wanted and outer != outer_wanted:
        return False
    if (_is_bare_list(answer) and outer_wanted == ROUND) or (_is_bare_list(gold) and outer == ROUND):
        return False  # several answers, and one point or interval
    plain_gold, plain_answer = (TEXT.sub(r"\1", text).strip() for text in (gold, answer))
    if (letter := LETTER.fullmatch(plain_gold)) and (mine_letter := LETTER.fullmatch(plain_answer)):
        return letter[1] == mine_letter[1]
    if WORDS.fullmatch(plain_gold):
        return plain_gold.lower() == plain_answer.lower()
    if len(answer) > LONGEST_ANSWER or HUGE.search(re.sub(r"[{}\s]", "", answer)):
        return False
    read = parsed_complex if EULER.search(answer) or EULER.search(gold) else parsed
    return any(_same(mine, wanted) for mine in read(_both_signs(answer)) for wanted in read(_both_signs(gold)))


def equal(mine: Any, gold: str) -> bool:
    return any(_same(mine, wanted) for wanted in parsed(gold))


def _same(mine: Any, wanted: Any) -> bool:
    """math-verify's verdict, and where numbers are compared ours: it takes everything below 1e-6 for the same."""
    return bool(verify(wanted, mine, allow_set_relation_comp=True, timeout_seconds=None)) and numbers_agree(mine, wanted)


def _both_signs(text: str) -> str:
    r"""a \pm b as the list of its two values, the way math-verify reads only the simplest form."""
    if "," in text or not any(sign in text for sign in ("±", "\\pm", "\\mp")):
        return text
    text = text.rpartition("=")[2].replace("±", "\\pm")
    return ", ".join(text.replace("\\pm", upper).replace("\\mp", lower) for upper, lower in ("+-", "-+"))


def numbers_agree(mine: Any, wanted: Any) -> bool:
    if isinstance(mine, MatrixBase) and isinstance(wanted, MatrixBase):
        return mine.shape == wanted.shape and all(map(numbers_agree, mine.flat(), wanted.flat()))
    if isinstance(mine, FiniteSet) and isinstance(wanted, FiniteSet):
        return len(mine) == len(wanted) and all(any(numbers_agree(a, b) for b in wanted.args) for a in mine.args)
    mine, wanted = _assigned(mine), _assigned(wanted)
    if isinstance(mine, Eq) and isinstance(wanted, Eq):
        return True  # equations may have their terms on either side
    if type(mine) is type(wanted) and isinstance(mine, Tuple | Interval | Relational):
        return len(mine.args) == len(wanted.args) and all(map(numbers_agree, mine.args, wanted.args))
    if not (isinstance(mine, Basic) and isinstance(wanted, Basic)):
        return True
    if not (getattr(mine, "is_number", False) and getattr(wanted, "is_number", False)):
        return True
    return _near(mine, wanted)


def _assigned(found: Any) -> Any:
    """5 of x = 5 and of 5 = x."""
    if isinstance(found, Eq) and found.lhs.is_Symbol != found.rhs.is_Symbol:
        value = found.rhs if found.lhs.is_Symbol else found.lhs
        return value if value.is_number else found
    return found


def _near(mine: Any, wanted: Any) -> bool:
    """To a relative tolerance, with digits and exponents enough for 1/2004!."""
    if mine.is_finite is False or wanted.is_finite is False:
        return True
    a, b = mine.doit().evalf(30), wanted.doit().evalf(30)
    if not (a.is_finite and b.is_finite):
        return True
    return bool(abs(a - b) <= RELATIVE_TOLERANCE * (abs(a) + abs(b)) / 2)


@lru_cache(maxsize=4096)
def parsed(text: str) -> tuple[Any, ...]:
    """What math-verify reads in one tidy answer, () if nothing."""
    try:
        found = parse(f"${text}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
    except Exception:  # a parser fed with anything a model may write; what it cannot read is no answer
        return ()
    return tuple(found)


def parsed_complex(text: str) -> tuple[Any, ...]:
    """As `parsed`, with the letter i as the imaginary unit."""
    return tuple(
        found.subs({letter: I for letter in found.free_symbols if str(letter) == "i"}) if isinstance(found, Basic) else found
        for found in parsed(text)
    )


def readable(gold: str) -> bool:
    return _number(gold) is not None or WORDS.fullmatch(gold) is not None or bool(parsed(gold))


def _found(response: str) -> list[Any]:
    """The last expression of an unmarked response."""
    tail = response.rpartition("</think>")[2][-SEARCHED_TAIL:]
    if HUGE.search(re.sub(r"[{}\s]", "", tail)):
        return []
    try:
        configs = [LatexExtractionConfig(), ExprExtractionConfig()]
        return list(parse(tail, configs, fallback_mode="no_fallback", parsing_timeout=None))
    except Exception:  # as in `parsed`
        return []


def _squeezed(text: str) -> str:
    """Without white space, except between digits."""
    return re.sub(r"\\left|\\right|\s+(?!\d)|(?<!\d)\s+", "", text)


def _number(text: str) -> Decimal | None:
    try:
        return Decimal(text) if NUMBER.fullmatch(text) else None
    except InvalidOperation:
        return None


def _rounded(a: Decimal, b: Decimal) -> bool:
    """Whether one is the other with fewer, but at least six, decimals."""
    places = -max(int(number.as_tuple().exponent) for number in (a, b))
    return places >= 6 and round(a, places) == round(b, places) and abs(a - b) <= Decimal(RELATIVE_TOLERANCE) * max(abs(a), abs(b))


def _is_bare_list(text: str) -> bool:
    return "," in text and not re.search(r"[(\[=]|\\\{", text)


def _outer(text: str) -> tuple[str, str] | None:
    """The pair of brackets that an answer stands in."""
    text = _squeezed(text).replace("\\{", "{").replace("\\}", "}")
    return (text[0], text[-1]) if text[:1] in ("(", "[", "{") and text[-1] in (")", "]", "}") else None
