"""ifeval: instructions that a program can verify, with the names and arguments of IFEval (Zhou et al. 2023, arXiv 2311.07911)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from miles.rewards.reasoning_gym import TAGGED
from miles.types import Sample

WORD = re.compile(r"\w+(?:['’-]\w+)*")
SENTENCE_END = re.compile(r"[.!?…]+[\"'”’)\]]*(?=\s|$)")
BULLET = re.compile(r"^\s*[*+-]\s+\S", re.MULTILINE)
HIGHLIGHT = re.compile(r"\*\*[^*\n]+\*\*|(?<!\*)\*[^*\n]+\*(?!\*)")
CHOICES = ("my answer is yes.", "my answer is no.", "my answer is maybe.")


def score(sample: Sample) -> dict[str, float] | None:
    """1.0 when every instruction is followed, else 0.0; the share that is followed is the detail `followed`.

    A row's metadata, or its label as a table or JSON text, holds "instruction_id_list" (names) and "kwargs" (a table of
    arguments for each). What is thought before </think> is not looked at, and an answer in <answer> tags is taken out of them.

    Returns:
        None for a row without instructions.

    Raises:
        ValueError: an instruction of an unknown name, or arguments that do not fit; the row is at fault, not the answer.
    """
    names, arguments = instructions_of(sample)
    if not names:
        return None
    text = answer_in(sample.response)
    followed = [follows(text, name, given) for name, given in zip(names, arguments, strict=True)]
    return {"reward": float(all(followed)), "followed": sum(followed) / len(followed)}


def follows(text: str, name: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a response follows one instruction; an empty one follows none. Raises ValueError as `score`."""
    if name not in CHECKS:
        raise ValueError(f"unknown instruction {name!r}; known are {', '.join(sorted(CHECKS))}")
    given = {key: value for key, value in arguments.items() if value is not None}
    try:
        return bool(text.strip()) and CHECKS[name](text, **given)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"instruction {name!r} with {given}: {error}") from None


def instructions_of(sample: Sample) -> tuple[list[str], list[Mapping[str, Any]]]:
    row: Any = sample.metadata
    if "instruction_id_list" not in row:
        row = sample.label
        if isinstance(row, str) and row.strip().startswith("{"):
            row = json.loads(row)
        if not isinstance(row, Mapping) or "instruction_id_list" not in row:
            return [], []
    for field in ("instruction_id_list", "kwargs"):
        if isinstance(row.get(field), str):
            raise ValueError(f"{field} is a list, not the text {row[field][:200]!r}")
    names, arguments = list(row["instruction_id_list"]), [each or {} for each in row.get("kwargs") or []]
    if len(names) != len(arguments):
        raise ValueError(f"{len(names)} names in instruction_id_list and {len(arguments)} tables in kwargs")
    return names, arguments


def answer_in(response: str) -> str:
    text = response.rpartition("</think>")[2]
    tagged = TAGGED.findall(text)
    return str(tagged[-1] if tagged else text).strip()


def compared(count: int, wanted: int, relation: str | None = None) -> bool:
    """ "at least" (also where nothing is said), "at most", "less than", "more than" or "exactly"."""
    relations: dict[str, Callable[[int, int], bool]] = {
        "at least": lambda a, b: a >= b,
        "at most": lambda a, b: a <= b,
        "less than": lambda a, b: a < b,
        "more than": lambda a, b: a > b,
        "exactly": lambda a, b: a == b,
    }
    if relation is not None and relation not in relations:
        raise TypeError(f"unknown relation {relation!r}")
    return relations[relation or "at least"](count, wanted)


def times(text: str, phrase: str) -> int:
    """Occurrences as whole words, whatever the case."""
    return len(re.findall(rf"(?<!\w){re.escape(phrase)}(?!\w)", text, re.IGNORECASE))


def words(text: str) -> int:
    return len(WORD.findall(text))


def sentences(text: str) -> int:
    """Ends of sentences, and what follows the last one."""
    ends = list(SENTENCE_END.finditer(text))
    rest = text[ends[-1].end() :] if ends else text
    return len(ends) + bool(WORD.search(rest))


def paragraphs(text: str, divider: str = r"\n\s*\n") -> list[str]:
    return [part.strip() for part in re.split(divider, text) if part.strip()]


def is_json(text: str) -> bool:
    if fenced := re.fullmatch(r"```(?:json)?\s*(.*?)```", text.strip(), re.DOTALL | re.IGNORECASE):
        text = fenced[1]
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def nth_begins(text: str, nth_paragraph: int, first_word: str, num_paragraphs: int | None = None) -> bool:
    parts = paragraphs(text)
    if not 1 <= nth_paragraph <= len(parts) or (num_paragraphs is not None and len(parts) != num_paragraphs):
        return False
    first = WORD.search(parts[nth_paragraph - 1])
    return first is not None and first[0].lower() == first_word.lower()


def two_answers(text: str) -> bool:
    parts = paragraphs(text, r"\*{6}")
    return len(parts) == 2 and parts[0] != parts[1]


def ends_with(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


CHECKS: dict[str, Callable[..., bool]] = {
    "keywords:existence": lambda text, keywords: all(times(text, word) for word in keywords),
    "keywords:forbidden_words": lambda text, forbidden_words: not any(times(text, word) for word in forbidden_words),
    "keywords:frequency": lambda text, keyword, frequency, relation=None: compared(times(text, keyword), frequency, relation),
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation=None: compared(
        text.lower().count(letter.lower()), let_frequency, let_relation
    ),
    "length_constraints:number_words": lambda text, num_words, relation=None: compared(words(text), num_words, relation),
    "length_constraints:number_sentences": lambda text, num_sentences, relation=None: compared(sentences(text), num_sentences, relation),
    "length_constraints:number_paragraphs": lambda text, num_paragraphs: len(paragraphs(text, r"\s?\*\*\*\s?")) == num_paragraphs,
    "length_constraints:nth_paragraph_first_word": nth_begins,
    "detectable_content:number_placeholders": lambda text, num_placeholders: len(re.findall(r"\[[^\[\]]+\]", text)) >= num_placeholders,
    "detectable_content:postscript": lambda text, postscript_marker: bool(
        re.search(rf"^\s*{re.escape(postscript_marker)}\s*\S", text, re.IGNORECASE | re.MULTILINE)
    ),
    "detectable_format:number_bullet_lists": lambda text, num_bullets: len(BULLET.findall(text)) == num_bullets,
    "detectable_format:number_highlighted_sections": lambda text, num_highlights: len(HIGHLIGHT.findall(text)) >= num_highlights,
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: (
        len(re.findall(rf"^\W*{re.escape(section_spliter)}\s+\d+", text, re.IGNORECASE | re.MULTILINE)) >= num_sections
    ),
    "detectable_format:constrained_response": lambda text: any(choice in text.lower() for choice in CHOICES),
    "detectable_format:json_format": is_json,
    "detectable_format:title": lambda text: any(title.strip() for title in re.findall(r"<<([^<>\n]+)>>", text)),
    "combination:two_responses": two_answers,
    "combination:repeat_prompt": lambda text, prompt_to_repeat: text.lower().startswith(prompt_to_repeat.strip().lower()),
    "startend:end_checker": ends_with,
    "startend:quotation": lambda text: len(text) > 2 and text.startswith('"') and text.endswith('"'),
    "change_case:english_capital": lambda text: text.upper() == text and text.lower() != text,
    "change_case:english_lowercase": lambda text: text.lower() == text and text.upper() != text,
    "change_case:capital_word_frequency": lambda text, capital_frequency, capital_relation=None: compared(
        sum(word.isupper() for word in WORD.findall(text)), capital_frequency, capital_relation
    ),
    "punctuation:no_comma": lambda text: "," not in text,
}
"""Instruction -> whether a text follows it, with the instruction's arguments by name."""
