"""Command-line flags as values. Flag = field name in kebab-case; abbreviations do not exist.

    --lr 1e-5   --lr=1e-5                    numbers and strings
    --fully-async   --no-fully-async         booleans
    --no-load                                an optional setting without its value; a list or table without entries
    --stop A B   --stop A --stop B           lists: several words, the flag again, or --stop '["A", "B"]'
    --eval-data easy=a.jsonl hard=b.jsonl    tables: name=value words, the flag again, or a JSON object
    --prompt-data a.jsonl                    the same as a=a.jsonl

A list or table given by flags replaces the file's. A value that begins with `--` is written with `=`.
"""

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from miles.config.data import set_name
from miles.config.other_names import meant_by, nearest
from miles.config.schema import Setting, flag, settings

OWN_FLAGS = ("--config", "--resume", "--help")


@dataclass(slots=True)
class Flags:
    """What a command line says: files in order, values by setting, problems, and settings whose value could not be read."""

    configs: list[str] = field(default_factory=list)
    resume: str | None = None
    values: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    faulty: set[str] = field(default_factory=set)
    help: bool = False


def read(argv: Sequence[str]) -> Flags:
    """Read a command line. Never raises: what is wrong is in `problems`."""
    found = Flags()
    on = {setting.flag: setting for setting in settings().values()}
    off = {"--no-" + name[2:]: setting for name, setting in on.items() if setting.has_off_flag}
    for name, equals, words in _occurrences(argv, found):
        if name in ("--help", "-h"):
            found.help = True
        elif name == "--config":
            found.configs += words
            if not words:
                found.problems.append("--config: needs a file")
        elif name == "--resume":
            found.resume = words[0] if words else None
            if len(words) != 1:
                found.problems.append("--resume: needs the name or the folder of one run")
        elif name in on:
            _note(found, on[name], words, equals)
        elif name in off:
            setting = off[name]
            found.values[setting.name] = {"bool": False, "list": [], "dict": {}}.get(setting.kind)
            if words:
                found.problems.append(f"{name}: takes no value, got {' '.join(words)}")
        else:
            guess = _nearest_flag(name, [*on, *off, *OWN_FLAGS])
            found.problems.append(
                f"{name}: unknown flag" + (f"; did you mean {guess}?" if guess else "; miles train-async --help lists them")
            )
    return found


def _nearest_flag(name: str, known: Sequence[str]) -> str | None:
    if difflib.get_close_matches(name, known, 1, cutoff=0.85):
        return nearest(name, known)
    return " or ".join(map(flag, meant_by(name))) or nearest(name, known)


def _occurrences(argv: Sequence[str], found: Flags) -> list[tuple[str, bool, list[str]]]:
    """Each flag with whether its value came after `=`, and the words up to the next flag."""
    occurrences: list[tuple[str, bool, list[str]]] = []
    for word in argv:
        if word == "-h" or (word.startswith("--") and word != "--"):
            name, equals, value = word.partition("=")
            occurrences.append((name, bool(equals), [value] if equals else []))
        elif occurrences and not occurrences[-1][1]:
            occurrences[-1][2].append(word)
        else:
            found.problems.append(f"{word!r}: belongs to no flag")
    return occurrences


def _note(found: Flags, setting: Setting, words: list[str], equals: bool) -> None:
    try:
        if setting.kind in ("list", "dict"):
            value = _collect(setting, words)
            before = found.values.get(setting.name)
            if before and setting.kind == "dict" and (twice := before.keys() & value.keys()):
                raise ValueError(f"{', '.join(sorted(twice))} is given twice")
            found.values[setting.name] = value if not before else before + value if setting.kind == "list" else before | value
        elif setting.kind == "bool":
            if len(words) > equals:
                raise ValueError(f"takes no value, got {' '.join(words)}; write {setting.flag} or --no-{setting.flag[2:]}")
            found.values[setting.name] = scalar("bool", words[0]) if words else True
        else:
            if len(words) != 1:
                raise ValueError(f"needs one value, got {' '.join(words) or 'none'}")
            found.values[setting.name] = scalar(setting.kind, words[0])
    except ValueError as error:
        found.problems.append(f"{setting.flag}: {error}")
        found.faulty.add(setting.name)


def scalar(kind: str, text: str) -> Any:
    """One word as a value of a kind.

    Raises:
        ValueError: says what was expected.
    """
    if kind == "bool":
        if text.lower() not in ("true", "false"):
            raise ValueError(f"must be true or false, got {text!r}")
        return text.lower() == "true"
    if kind in ("int", "float"):
        try:
            return int(text) if kind == "int" else float(text)
        except ValueError:
            raise ValueError(f"must be a {'whole ' if kind == 'int' else ''}number, got {text!r}") from None
    if kind == "any":
        try:
            return json.loads(text)
        except ValueError:
            return text
    return text


def _collect(setting: Setting, words: list[str]) -> Any:
    if not words:
        raise ValueError(f"needs a value; --no-{setting.flag[2:]} empties it")
    if len(words) == 1 and words[0][:1] == ("[" if setting.kind == "list" else "{"):
        try:
            whole = json.loads(words[0])
        except ValueError as error:
            if setting.kind == "dict":
                raise ValueError(f"is not JSON: {error}") from None
        else:
            return whole
    if setting.kind == "list":
        return [scalar(setting.item, word) for word in words]
    table: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals and setting.name == "prompt_data":
            key, equals, value = set_name(word), "=", word
        if key in table:
            raise ValueError(f"{key} is given twice" + (f"; write NAME={value} with another name" if setting.name == "prompt_data" else ""))
        if not equals or not key:
            raise ValueError(f"wants name=value, got {word!r}")
        table[key] = scalar(setting.item, value)
    return table
