"""The formats that rows come in, each readable from front to back and, where the format allows it, one row at a time."""

from __future__ import annotations

import json
import logging
import os
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import pyarrow
import pyarrow.parquet

from miles.data.tokenizer import kind, read_json
from miles.plugins import load

logger = logging.getLogger(__name__)

BATCH = 1024
BATCH_BYTES = 1 << 21
KEPT_BYTES = 1 << 28
"""Row groups of a parquet file that stay in memory: the last used ones, together no larger than this."""
LARGE_GROUP = 1 << 26


class Found(NamedTuple):
    """One row of a file. `value` is the exception that says why, when it cannot be read."""

    origin: str  # "line 3" or "row 3"
    value: Any
    place: int  # where `RowFile.at` finds it again: a byte offset or a row's index


class RowFile(Protocol):
    """An open file of rows."""

    def __iter__(self) -> Iterator[Found]: ...

    def at(self, place: int) -> Any:
        """The row at that place, read again. Raises ValueError when the file has changed or cannot be read in pieces."""
        ...


def read_rows(path: str) -> Iterator[tuple[str, Any]]:
    """(origin, row) of any supported file; a line that cannot be read comes as the exception that says why.

    Raises:
        ValueError: the file as a whole is missing or unreadable.
    """
    for found in open_rows(path):
        yield found.origin, found.value


def open_rows(path: str) -> RowFile:
    """A .jsonl, .json or .parquet file, or a directory of datasets.save_to_disk.

    Raises:
        ValueError: no such file, or of no known kind.
    """
    where = Path(path).expanduser()
    if not path or not where.exists():
        raise ValueError(f"--prompt-data or --eval-data: no file {path!r}")
    if where.is_dir():
        return SavedDataset(where)
    formats: dict[str, type[JsonLines] | type[Json] | type[Parquet]] = {".jsonl": JsonLines, ".json": Json, ".parquet": Parquet}
    if where.suffix not in formats:
        raise ValueError(f"{path}: not a .jsonl, .json or .parquet file, nor a directory written by datasets.save_to_disk")
    return formats[where.suffix](where)


class JsonLines:
    """One JSON object a line; empty lines are passed over."""

    def __init__(self, path: Path):
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._file: BinaryIO | None = None

    def __iter__(self) -> Iterator[Found]:
        place = 0
        with self._path.open("rb") as file:
            self._seen = _look(file)
            for number, raw in enumerate(file, 1):
                if line := _bare(raw, place):
                    yield Found(f"line {number}", _parsed(line), place)
                place += len(raw)

    def at(self, place: int) -> Any:
        if self._file is None:
            self._file = self._path.open("rb")
        if _look(self._file) != self._seen:
            raise _changed(self._path)
        self._file.seek(place)
        return _parsed(_bare(self._file.readline(), place))


def _look(file: BinaryIO | Path) -> tuple[int, int]:
    seen = file.stat() if isinstance(file, Path) else os.fstat(file.fileno())
    return seen.st_size, seen.st_mtime_ns


def _changed(path: Path) -> ValueError:
    return ValueError(f"{path} has changed since it was checked at the start of the run")


def _bare(raw: bytes, place: int) -> bytes:
    return (raw if place else raw.removeprefix(b"\xef\xbb\xbf")).strip()


def _parsed(line: bytes) -> Any:
    try:
        value = read_json(line)
    except ValueError as error:
        return error
    return _as_text(value) if b"\\ud" in line.lower() else value


def _as_text(row: Any) -> Any:
    """The row; or why not, where an escape in it is half of a character, which no tokenizer and no file takes."""
    for field, value in row.items() if isinstance(row, dict) else ():
        try:
            json.dumps([field, value], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            return ValueError(f"field {field!a}: not text: {error}")
        except RecursionError:
            break  # too deep, which is told where rows are checked
    return row


class Json:
    """A list of objects, which can only be read from front to back."""

    def __init__(self, path: Path):
        self._path = path

    def at(self, place: int) -> Any:
        raise ValueError(f"--lazy-data: {self._path}: a .json file cannot be read row by row; .jsonl, .parquet and saved datasets can")

    def __iter__(self) -> Iterator[Found]:
        try:
            rows = read_json(self._path.read_bytes().removeprefix(b"\xef\xbb\xbf"))
        except ValueError as error:
            raise ValueError(f"{self._path}: {error}") from None
        if not isinstance(rows, list):
            raise ValueError(f"{self._path}: a {kind(rows)}, not a list of rows (one object a line is .jsonl)")
        for place, row in enumerate(rows):
            yield Found(f"row {place + 1}", _as_text(row), place)


class Parquet:
    """Read row group by row group; of those that single rows were asked of, some stay in memory."""

    def __init__(self, path: Path):
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._open: tuple[pyarrow.parquet.ParquetFile, list[int]] | None = None  # and the first row of each group, and the end
        self._kept: dict[int, pyarrow.Table] = {}  # the one used last stands last

    def __iter__(self) -> Iterator[Found]:
        place = 0
        try:
            with pyarrow.parquet.ParquetFile(self._path) as file:
                self._seen = _look(self._path)
                names = file.schema_arrow.names
                if twice := {name for name in names if names.count(name) > 1}:
                    raise ValueError(f"{self._path}: several columns are called {', '.join(sorted(twice))}")
                size = sum(file.metadata.row_group(group).total_byte_size for group in range(file.num_row_groups))
                for batch in file.iter_batches(min(BATCH, max(1, BATCH_BYTES * file.metadata.num_rows // max(1, size)))):
                    for row in _values(batch):
                        yield Found(f"row {place + 1}", row, place)
                        place += 1
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{self._path}: not a readable parquet file (after row {place}): {error}") from error

    def at(self, place: int) -> Any:
        file, starts = self._open = self._open or self._opened()
        if _look(self._path) != self._seen:
            raise _changed(self._path)
        group = bisect_right(starts, place) - 1
        table = self._kept.pop(group, None)
        if table is None:
            try:
                table = file.read_row_group(group)
            except (pyarrow.ArrowException, OSError) as error:
                raise ValueError(f"row group {group + 1} of {len(starts) - 1} cannot be read: {error}") from error
        self._kept[group] = table
        while len(self._kept) > 1 and sum(each.nbytes for each in self._kept.values()) > KEPT_BYTES:
            del self._kept[next(iter(self._kept))]
        return _values(table.slice(place - starts[group], 1))[0]

    def _opened(self) -> tuple[pyarrow.parquet.ParquetFile, list[int]]:
        file = pyarrow.parquet.ParquetFile(self._path)
        groups = [file.metadata.row_group(group) for group in range(file.num_row_groups)]
        if (largest := max((group.total_byte_size for group in groups), default=0)) > LARGE_GROUP:
            text = "%s: --lazy-data reads a whole row group for a row, and the largest has %.0f MB; write it with a smaller row_group_size"
            logger.warning(text, self._path, largest / 1e6)
        return file, [0, *accumulate(group.num_rows for group in groups)]


def _values(batch: pyarrow.Table | pyarrow.RecordBatch) -> list[Any]:
    """Its rows as tables; for one that holds what Python cannot, the exception that says so."""
    try:
        return list(batch.to_pylist())
    except (ValueError, OverflowError, pyarrow.ArrowException):
        return [_value(batch, row) for row in range(batch.num_rows)]


def _value(batch: pyarrow.Table | pyarrow.RecordBatch, row: int) -> Any:
    found = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            found[name] = column[row].as_py()
        except (ValueError, OverflowError, pyarrow.ArrowException) as error:
            return ValueError(f"field {name!r}: {error}")
    return found


class SavedDataset:
    """A directory of datasets.save_to_disk: mapped into memory, never read as a whole."""

    def __init__(self, path: Path):
        try:
            data = load("datasets.load_from_disk")(str(path))
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            raise ValueError(f"{path}: not a directory written by datasets.save_to_disk: {error}") from error
        if isinstance(data, dict):
            raise ValueError(f"{path}: holds several splits; name one: {', '.join(f'{path}/{split}' for split in data)}")
        self._data = data.with_format(None)

    def __iter__(self) -> Iterator[Found]:
        for place, row in enumerate(self._data):
            yield Found(f"row {place + 1}", row, place)

    def at(self, place: int) -> Any:
        return self._data[place]
