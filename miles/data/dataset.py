"""Files of prompts: every row checked, rendered and filtered once at start, then held in memory or read again when drawn."""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, overload

from miles.config.data import DataSection
from miles.data.files import Found, RowFile, open_rows
from miles.data.tokenizer import as_messages, as_tools, check_prompt, encode, kind, plain, prompt_text, read_json
from miles.types import Message

logger = logging.getLogger(__name__)

RENDERED_AT_ONCE = 1024
CHARACTERS_AT_ONCE = 2**20
CHECKED_EARLY = 10_000  # rows: a fraction of a second


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt as it will be sent. Example: PromptRow("2+2?", [5, 6], "4", {}, None, "line 1")."""

    prompt: str | list[Message]
    prompt_ids: Sequence[int]  # compact: a list of ints takes nine times the memory
    label: Any
    metadata: dict[str, Any]
    tools: list[dict[str, Any]] | None
    origin: str  # "line 3" or "row 3" of the file


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The prompts of one file that are kept, in file order, and what became of the others."""

    path: str
    rows: Sequence[PromptRow]
    num_skipped: int = 0  # could not be read (skip_bad_rows)
    num_too_long: int = 0  # longer than max_prompt_length, or without room for an answer
    difficulty: Sequence[float] | None = None  # [rows] of the curriculum's field


class BadRowError(ValueError):
    """One row that cannot be used; the message holds file, line and reason."""


class RowsOnDisk(Sequence[PromptRow]):
    """Rows of which only the places are in memory, 16 bytes each; a row is read, checked and rendered again when asked for."""

    def __init__(self, path: str, file: RowFile, tokenizer: Any, args: DataSection):
        self._path, self._file, self._tokenizer, self._args = path, file, tokenizer, args
        self._places = array("q")
        self._numbers = array("q")
        self._kind = "row"

    def note(self, found: Found) -> None:
        self._places.append(found.place)
        self._kind, number = found.origin.split()
        self._numbers.append(int(number))

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> PromptRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[PromptRow]: ...
    def __getitem__(self, index: int | slice) -> PromptRow | list[PromptRow]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        origin = f"{self._kind} {self._numbers[index]}"
        try:
            text, row = read_row(self._tokenizer, origin, self._file.at(self._places[index]), self._args)
        except ValueError as error:
            raise BadRowError(f"{self._path}, {origin}: {error}") from None
        return replace(row, prompt_ids=array("i", encode(self._tokenizer, [text])[0]))


class _Keeper:
    """Takes checked rows, encodes them in batches, and keeps those that are short enough."""

    def __init__(self, tokenizer: Any, args: DataSection, lazy: RowsOnDisk | None, room: int | None):
        self.tokenizer, self.args, self.lazy, self.room = tokenizer, args, lazy, room
        self.rows: list[PromptRow] = []
        self.difficulty = array("d")
        self.num_too_long = self.num_no_room = 0
        self.no_room = ""  # the first of these
        self.lengths: tuple[int, int] = (2**31, 0)
        self.batch: list[tuple[str, PromptRow, Found, float]] = []
        self.characters = 0

    def add(self, text: str, row: PromptRow, found: Found, difficulty: float) -> None:
        self.batch.append((text, row, found._replace(value=None), difficulty))
        self.characters += len(text)
        if len(self.batch) == RENDERED_AT_ONCE or self.characters > CHARACTERS_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        limit = self.args.max_prompt_length
        for (_, row, found, difficulty), ids in zip(self.batch, encode(self.tokenizer, [text for text, *_ in self.batch]), strict=True):
            if limit is not None and len(ids) > limit:
                self.num_too_long += 1
                continue
            if self.room is not None and len(ids) >= self.room:
                self.num_no_room += 1
                self.no_room = self.no_room or f"{found.origin}, {len(ids)} tokens"
                continue
            self.lengths = (min(self.lengths[0], len(ids)), max(self.lengths[1], len(ids)))
            self.difficulty.append(difficulty)
            if self.lazy is None:
                self.rows.append(replace(row, prompt_ids=array("i", ids)))
            else:
                self.lazy.note(found)
        self.batch.clear()
        self.characters = 0


def load_prompts(
    path: str, tokenizer: Any, args: DataSection, difficulty: str | None = None, *, lazy: bool = False, room: int | None = None
) -> PromptSet:
    """Read a .jsonl, .json or .parquet file or a directory of datasets.save_to_disk.

    Every row is checked and rendered here, so that nothing in the data can end a run later. Length is that of the ids
    that are sent: templated, tools and BOS included.

    Args:
        difficulty: the field (of a row or its metadata) with its difficulty, a number.
        lazy: keep only the rows' places.
        room: tokens of an engine's context, for prompt and answer together. Prompts that leave none for an answer are left out.

    Raises:
        ValueError: no such file, nothing left in it, or (without skip_bad_rows) file, line, field and reason of the first bad row.
    """
    file = open_rows(path)
    keeper = _Keeper(tokenizer, args, RowsOnDisk(path, file, tokenizer, args) if lazy else None, room)
    skipped: list[str] = []
    num_skipped = 0
    for found in file:
        try:
            text, row = read_row(tokenizer, found.origin, found.value, args)
            hard = 0.0 if difficulty is None else _difficulty(found.value, row.metadata, difficulty)
        except ValueError as error:
            bad = BadRowError(f"{path}, {found.origin}: {error}")
            if not args.skip_bad_rows:
                raise bad from None
            num_skipped += 1
            skipped = skipped or [str(bad)]
        else:
            keeper.add(text, row, found, hard)
    keeper.flush()
    rows: Sequence[PromptRow] = keeper.rows if keeper.lazy is None else keeper.lazy
    _report(path, len(rows), num_skipped, skipped, keeper)
    if keeper.lazy is not None:
        rows[0]  # a format that cannot be read row by row says so now
    return PromptSet(path, rows, num_skipped, keeper.num_too_long + keeper.num_no_room, None if difficulty is None else keeper.difficulty)


@dataclass(frozen=True, slots=True)
class FirstRows:
    """What the first rows of a file show without a tokenizer."""

    count: int  # that can be used
    labelled: int  # of these
    is_all: bool  # the file has no more


def check_prompts(path: str, args: DataSection, difficulty: str | None = None, most: int = CHECKED_EARLY) -> FirstRows:
    """Look at the first rows of a file as `load_prompts` will, for who has no tokenizer yet; raises what it will raise."""
    count = labelled = seen = 0
    first_bad: BadRowError | None = None
    for found in islice(open_rows(path), most):
        seen += 1
        try:
            _, row = read_row(None, found.origin, found.value, args)
            if difficulty is not None:
                _difficulty(found.value, row.metadata, difficulty)
        except ValueError as error:
            first_bad = first_bad or BadRowError(f"{path}, {found.origin}: {error}")
            if not args.skip_bad_rows:
                raise first_bad from None
            continue
        count += 1
        labelled += row.label is not None
    if not count and seen < most:
        raise _nothing(path, seen, str(first_bad))
    return FirstRows(count, labelled, seen < most)


def read_row(tokenizer: Any | None, origin: str, value: Any, args: DataSection) -> tuple[str, PromptRow]:
    """The text to send, and all of the row but its ids. Without a tokenizer: no text, and all is checked but the template's own rules."""
    if isinstance(value, Exception):
        raise ValueError(str(value))
    if not isinstance(value, dict):
        raise ValueError(f"a {kind(value)}, not an object with fields")
    if args.prompt_key not in value:
        raise ValueError(f"no field {args.prompt_key!r} (--prompt-key); there are {', '.join(map(str, value)) or 'none'}")
    try:
        field = args.tools_key
        tools = as_tools(value.get(field)) if args.apply_chat_template else None
        field = args.prompt_key
        prompt = plain(value[field])
        if tokenizer is None:
            check_prompt(prompt, args)
        text = "" if tokenizer is None else prompt_text(tokenizer, prompt, tools, args)
        field = args.metadata_key
        metadata = _metadata(plain(value.get(field)))
        field = args.label_key
        label = plain(value.get(field))
    except ValueError as error:
        raise ValueError(f"field {field!r}: {error}") from None
    shown = prompt if isinstance(prompt, str) else as_messages(prompt)
    return text, PromptRow(shown, [], label, metadata, tools, origin)


def _metadata(given: Any) -> dict[str, Any]:
    if isinstance(given, str):
        given = plain(read_json(given)) if given.strip() else None
    if given is not None and not isinstance(given, dict):
        raise ValueError(f"a {kind(given)}, not a table")
    return given or {}


def _difficulty(value: dict[str, Any], metadata: dict[str, Any], field: str) -> float:
    found = plain(value.get(field, metadata.get(field)))
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        what = "missing" if found is None else f"{found!r}"
        raise ValueError(f"field {field!r} (--curriculum): {what}, not a number")
    return float(found)


def _report(path: str, kept: int, num_skipped: int, skipped: list[str], keeper: _Keeper) -> None:
    longest, too_long = keeper.args.max_prompt_length, keeper.num_too_long
    if num_skipped:
        logger.warning("%s: skipped %d bad rows; the first: %s", path, num_skipped, skipped[0])
    if too_long:
        logger.warning("%s: dropped %d prompts longer than max_prompt_length %s", path, too_long, longest)
    no_room = ""
    if keeper.num_no_room:
        no_room = f"dropped {keeper.num_no_room} prompts that leave no room for an answer in --engine-max-context {keeper.room} "
        no_room += f"(the first: {keeper.no_room}); raise it, or say --max-prompt-length"
        logger.warning("%s: %s", path, no_room)
    if not kept:
        dropped = f"; {too_long} dropped as longer than --max-prompt-length {longest}" if too_long else ""
        dropped += f"; {no_room}" if no_room else ""
        raise _nothing(path, num_skipped, "".join(skipped), dropped)
    logger.info("%s: %d prompts, %d to %d tokens", path, kept, *keeper.lengths)


def _nothing(path: str, num_skipped: int, first: str, dropped: str = "") -> ValueError:
    why = (f"; {num_skipped} bad rows skipped, the first: {first}" if num_skipped else "") + dropped
    return ValueError(f"{path}: no prompts to use{why or ': the file is empty'}")
