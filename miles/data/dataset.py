"""Files of prompts, read, checked, rendered and filtered once at start."""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from miles.config.data import DataSection
from miles.data.tokenizer import as_messages, as_tools, encode, kind, plain, prompt_text
from miles.plugins import load
from miles.types import Message

logger = logging.getLogger(__name__)

RENDERED_AT_ONCE = 1024


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
    rows: list[PromptRow]
    num_skipped: int = 0  # could not be read (skip_bad_rows)
    num_too_long: int = 0  # longer than max_prompt_length


class BadRowError(ValueError):
    """One row that cannot be used; the message holds file, line and reason."""


def load_prompts(path: str, tokenizer: Any, args: DataSection) -> PromptSet:
    """Read a .jsonl, .json or .parquet file or a directory of datasets.save_to_disk.

    Every row is checked and rendered here, so that nothing in the data can end a run later. Length is that of the ids
    that are sent: templated, tools and BOS included.

    Raises:
        ValueError: no such file, nothing left in it, or (without skip_bad_rows) file, line and reason of the first bad row.
    """
    rows: list[PromptRow] = []
    skipped: list[str] = []
    num_too_long = 0
    batch: list[tuple[str, PromptRow]] = []

    def keep_batch() -> None:
        nonlocal num_too_long
        for (_, row), ids in zip(batch, encode(tokenizer, [text for text, _ in batch]), strict=True):
            if args.max_prompt_length is not None and len(ids) > args.max_prompt_length:
                num_too_long += 1
                continue
            rows.append(replace(row, prompt_ids=array("i", ids)))
        batch.clear()

    for origin, value in read_rows(path):
        try:
            batch.append(_row(tokenizer, origin, value, args))
        except ValueError as error:
            bad = BadRowError(f"{path}, {origin}: {error}")
            if not args.skip_bad_rows:
                raise bad from None
            skipped.append(str(bad))
        if len(batch) == RENDERED_AT_ONCE:
            keep_batch()
    keep_batch()
    _report(path, rows, skipped, num_too_long, args)
    return PromptSet(path, rows, len(skipped), num_too_long)


def _row(tokenizer: Any, origin: str, value: Any, args: DataSection) -> tuple[str, PromptRow]:
    if isinstance(value, Exception):
        raise ValueError(str(value))
    if not isinstance(value, dict):
        raise ValueError(f"a {kind(value)}, not an object with fields")
    if args.prompt_key not in value:
        raise ValueError(f"no field {args.prompt_key!r} (--prompt-key); there are {', '.join(map(str, value)) or 'none'}")
    prompt = plain(value[args.prompt_key])
    tools = as_tools(value.get(args.tools_key)) if args.apply_chat_template else None
    text = prompt_text(tokenizer, prompt, tools, args)
    metadata = plain(value.get(args.metadata_key))
    if isinstance(metadata, str):
        metadata = _parsed(metadata, args.metadata_key)
    if metadata is not None and not isinstance(metadata, dict):
        raise ValueError(f"{args.metadata_key} is a {kind(metadata)}, not a table")
    shown = prompt if isinstance(prompt, str) else as_messages(prompt)
    return text, PromptRow(shown, [], plain(value.get(args.label_key)), metadata or {}, tools, origin)


def _parsed(text: str, key: str) -> Any:
    try:
        return json.loads(text) if text.strip() else None
    except json.JSONDecodeError as error:
        raise ValueError(f"{key} is text that is not JSON: {error}") from None


def _report(path: str, rows: list[PromptRow], skipped: list[str], num_too_long: int, args: DataSection) -> None:
    if skipped:
        logger.warning("%s: skipped %d bad rows; the first: %s", path, len(skipped), skipped[0])
    if num_too_long:
        logger.warning("%s: dropped %d prompts longer than max_prompt_length %s", path, num_too_long, args.max_prompt_length)
    if not rows:
        why = f"; {len(skipped)} bad rows skipped, the first: {skipped[0]}" if skipped else ""
        why += f"; {num_too_long} dropped as longer than --max-prompt-length {args.max_prompt_length}" if num_too_long else ""
        raise ValueError(f"{path}: no prompts to use{why or ': the file is empty'}")
    logger.info("%s: %d prompts, %d to %d tokens", path, len(rows), *_span([len(row.prompt_ids) for row in rows]))


def _span(lengths: list[int]) -> tuple[int, int]:
    return min(lengths), max(lengths)


def read_rows(path: str) -> Iterator[tuple[str, Any]]:
    """Yield (origin, row) of any supported file; a line that cannot be read comes as the exception that says why.

    Raises:
        ValueError: the file as a whole is missing or unreadable.
    """
    where = Path(path).expanduser()
    if not path or not where.exists():
        raise ValueError(f"--prompt-data or --eval-data: no file {path!r}")
    if where.is_dir():
        yield from _saved_dataset(where)
    elif where.suffix == ".jsonl":
        yield from _json_lines(where)
    elif where.suffix == ".json":
        yield from _json(where)
    elif where.suffix == ".parquet":
        yield from _parquet(where)
    else:
        raise ValueError(f"{path}: not a .jsonl, .json or .parquet file, nor a directory written by datasets.save_to_disk")


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            if not line.strip():
                continue
            try:
                yield f"line {number}", json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
                yield f"line {number}", ValueError(f"not JSON: {error}")


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        rows = json.loads(path.read_bytes().removeprefix(b"\xef\xbb\xbf"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(rows, list):
        raise ValueError(f"{path}: a {kind(rows)}, not a list of rows (one object a line is .jsonl)")
    for number, row in enumerate(rows, 1):
        yield f"row {number}", row


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(RENDERED_AT_ONCE):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a readable parquet file (after row {number}): {error}") from error


def _saved_dataset(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        data = load("datasets.load_from_disk")(str(path))
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path}: not a directory written by datasets.save_to_disk: {error}") from error
    if isinstance(data, dict):
        raise ValueError(f"{path}: holds several splits; name one: {', '.join(f'{path}/{split}' for split in data)}")
    for number, row in enumerate(data.with_format(None), 1):
        yield f"row {number}", row
