"""The files that a job reads: `Source` is what all have in common; here are those of lines, JSONL and CSV. `parquet` has its own.

A source is streamed and never held: `records` begins at any *position*, a number that the source itself gave out (bytes, or rows of Parquet).
"""

from __future__ import annotations

import csv
import json
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from dovetail.checks import did_you_mean, shown
from dovetail.cli.prompts import parse_json
from dovetail.errors import ConfigError, RequestError
from dovetail_batch.rows import KEYS

MAX_LINE_BYTES = 64 * 2**20  # a longer line is no row of text
JSON_CELLS = ("messages", "token_ids", "sampling")  # columns that hold JSON where cells are text
_BOM = b"\xef\xbb\xbf"

Fields = dict[str, Any]


class Source(ABC):
    """The rows of one file."""

    id_key = "id"

    def __init__(self, path: Path, columns: Mapping[str, str]) -> None:
        """`columns` are the file's names of columns by ours; empty: they are ours. Raises `ConfigError` for a file that can't be read as what it is
        said to be."""
        self.path, self.columns = path, columns

    @property
    @abstractmethod
    def first(self) -> int:
        """The position of the first row."""

    @abstractmethod
    def records(self, position: int) -> Iterator[tuple[Any, int]]:
        """Yield the rows from a position on as the file has them, each with the position behind it. Raises `ConfigError` where the file ends to be
        rows at all."""

    @abstractmethod
    def fields(self, record: Any) -> Fields:
        """Return a record's fields, of which `id_key` is the id. Raises `RequestError` for a record that can't be read at all."""

    def convert(self, fields: Fields) -> Fields:
        """Return a record's fields by our names and in our types. Raises `RequestError`."""
        return fields

    def stamp(self) -> tuple[int, int, int]:
        """Return what changes when the file does: its inode, its size in bytes, when it was written. Raises `ConfigError`."""
        found = self._stat()
        return found.st_ino, found.st_size, found.st_mtime_ns

    def opened(self) -> BinaryIO:
        """Open the file. Raises `ConfigError`, also for one that can't be read again from its beginning: opening a pipe might wait for ever."""
        mode = self._stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a folder's own error says what it is
            told = "a pipe or a device: a job reads its rows twice, and again when it goes on: write them to a file first"
            raise ConfigError(f"input: {self.path}: {told}")
        try:
            return self.path.open("rb")
        except OSError as error:
            raise unreadable(self.path, error) from None

    def _stat(self) -> os.stat_result:
        try:
            return self.path.stat()
        except (OSError, ValueError) as error:  # ValueError: a NUL in its name
            raise unreadable(self.path, error) from None


class Jsonl(Source):
    """An object a line. Blank lines are no rows."""

    @property
    def first(self) -> int:
        return 0

    def records(self, position: int) -> Iterator[tuple[bytes, int]]:
        return ((line, behind) for line, behind in lines(self, position) if line.strip())

    def fields(self, record: bytes) -> Fields:
        try:
            given = parse_json(record.decode("utf-8-sig").strip())
        except UnicodeDecodeError as error:
            raise RequestError(f"not UTF-8: {error.reason} at byte {error.start}") from None
        if not isinstance(given, dict):
            raise RequestError(f'expected an object like {{"id": "1", "prompt": "…"}}, got {shown(given)}')
        return {ours: given[theirs] for ours, theirs in self.columns.items() if theirs in given} if self.columns else given


class Csv(Source):
    """Comma-separated values with a header (RFC 4180). Cells of `messages`, `token_ids` and `sampling` hold JSON; an empty one is left out."""

    def __init__(self, path: Path, columns: Mapping[str, str]) -> None:
        super().__init__(path, columns)
        csv.field_size_limit(MAX_LINE_BYTES)
        header, self._first = next(self._cells(0), ([], 0))
        self._header, self._names = header, names_of_columns(path, header, columns)

    @property
    def first(self) -> int:
        return self._first

    def records(self, position: int) -> Iterator[tuple[list[str], int]]:
        return ((cells, end) for cells, end in self._cells(position) if cells)

    def fields(self, record: list[str]) -> Fields:
        if len(record) != len(self._header):
            raise RequestError(f"{len(record)} cells, where the header has {len(self._header)}")
        cells = dict(zip(self._header, record, strict=True))
        return {ours: cells[theirs] for ours, theirs in self._names.items() if cells[theirs] != ""}

    def convert(self, fields: Fields) -> Fields:
        return with_json_read(fields)

    def _cells(self, position: int) -> Iterator[tuple[list[str], int]]:
        """Yield rows with the position behind each: the reader takes no line before it needs it, so it is where the lines are."""
        behind = position

        def texts() -> Iterator[str]:
            nonlocal behind
            for line, end in lines(self, position):
                if behind == 0:
                    line = line.removeprefix(_BOM)  # before the reader sees it: a quote is one only where a cell begins
                behind = end
                yield line.decode("utf-8", "surrogateescape")  # what isn't UTF-8 is refused with its row, since it is no Unicode

        reader = csv.reader(texts(), strict=True)
        try:
            for cells in reader:
                yield cells, behind
        except csv.Error as error:
            raise ConfigError(f"{self.path}: not CSV from byte {behind} on: {error}") from None


def lines(source: Source, position: int) -> Iterator[tuple[bytes, int]]:
    """Yield the lines of a file with the position behind each. Raises `ConfigError` for a line that is no text's."""
    with source.opened() as file:
        try:
            file.seek(position)
            while line := file.readline(MAX_LINE_BYTES + 1):
                if len(line) > MAX_LINE_BYTES:
                    raise ConfigError(f"{source.path}: the line at byte {position} has more than {MAX_LINE_BYTES} bytes: that is no row")
                position += len(line)
                yield line, position
        except OSError as error:
            raise unreadable(source.path, error) from None


def names_of_columns(path: Path, header: list[str], columns: Mapping[str, str]) -> dict[str, str]:
    """Return the file's names of columns by ours. Raises `ConfigError` if one is missing or there twice or, unless `columns` says which, unknown."""
    for name in columns.values() if columns else header:
        if header.count(name) > 1:
            raise ConfigError(f"{path}: the header has the column {shown(name)} twice")
    if columns:
        for ours, theirs in columns.items():
            if theirs not in header:
                told = did_you_mean(theirs, header) or f"; there are {', '.join(map(shown, header))}"
                raise ConfigError(f"{path}: no column {shown(theirs)}, which is to be the {ours}{told}")
        return dict(columns)
    for name in header:
        if name not in KEYS:
            told = did_you_mean(name, KEYS) or f"; known are {', '.join(KEYS)}."
            raise ConfigError(f"{path}: unknown column {shown(name)}{told} Say with `columns` of the input which are to be used")
    return {name: name for name in header}


def with_json_read(fields: Fields) -> Fields:
    """Return the fields with the texts of those that are lists or objects read as JSON. Raises `RequestError`."""
    read = {}
    for name in JSON_CELLS:
        if isinstance(text := fields.get(name), str):
            try:
                read[name] = json.loads(text)
            except (ValueError, RecursionError):
                raise RequestError(f"{name} must be JSON, got {shown(text)}") from None
    return {**fields, **read}


def unreadable(path: Path, error: OSError | ValueError) -> ConfigError:
    return ConfigError(f"input: {path}: can't be read: {getattr(error, 'strerror', None) or error}")
