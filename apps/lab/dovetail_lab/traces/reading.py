"""Read text and validated fields from trace files. Errors name file, line, column and the expected
value."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dovetail.errors import DovetailError, shown
from dovetail_lab.traces.request import TraceRequest

UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_GZIP = b"\x1f\x8b"
# per request: more than any model supports, so that a unit error doesn't exhaust memory
MOST_TOKENS = 1 << 24


class TraceError(DovetailError, ValueError):
    """Invalid trace or workload. The message names file, line, column and the expected value."""


@dataclass(frozen=True, slots=True)
class Source:
    """A file's name and its text, without gzip and byte-order mark."""

    path: str
    text: str  # lines end in \n
    row_is: Literal["line", "item"] = "line"  # of a file, or of a JSON list

    def error(
        self, message: str, row: int | None = None, column: str | int | None = None
    ) -> TraceError:
        """Return an error at a place. `row` counts from 1; `column` is a name, or a number if the
        format has no names."""
        place = (
            self.path
            if row is None
            else f"{self.path}:{row}"
            if self.row_is == "line"
            else f"{self.path}: item {row}"
        )
        return TraceError(
            ": ".join(
                filter(None, (place, f"column {column}" if column is not None else "", message))
            )
        )


class Located(NamedTuple):
    """A request and its line or item in the file. Times are on the file's own clock; an empty id
    means its number in the file."""

    line: int
    request: TraceRequest


@dataclass(frozen=True, slots=True)
class Contents:
    """Requests of a file in order, and notes on changes to them."""

    located: list[Located]
    notes: tuple[str, ...] = ()
    row_is: Literal["line", "item"] = "line"  # as in `Source`: what `Located.line` counts


def read_source(path: str | Path) -> Source:
    """Return the file's text. Raises `TraceError` if it can't be read, isn't UTF-8, or is empty."""
    try:
        data = Path(path).read_bytes()
        data = gzip.decompress(data) if data.startswith(_GZIP) else data
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: expected text in UTF-8, byte {error.start} is none") from None
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(
            f"{path}: can't be read: {getattr(error, 'strerror', None) or error}"
        ) from None
    if not text.strip():
        raise TraceError(f"{path}: expected a trace, the file is empty")
    return Source(str(path), text.replace("\r\n", "\n").replace("\r", "\n"))


def json_of(source: Source) -> Any:
    """Return the JSON value of the file."""
    return _parse(source, source.text, 1)


def json_rows(source: Source) -> Iterator[JsonObject]:
    """Yield the objects of a file of JSON lines; empty lines are skipped."""
    for number, line in enumerate(source.text.split("\n"), 1):
        if line.strip():
            yield JsonObject(source, number, _parse(source, line, number))


def _parse(source: Source, text: str, first_line: int) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise source.error("expected JSON: nested too deeply", first_line) from None
    except json.JSONDecodeError as error:
        cut_off = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated")
        said = "the text is truncated" if cut_off else error.msg
        raise source.error(
            f"expected JSON: {said}", first_line + error.lineno - 1, error.colno
        ) from None


class JsonObject:
    """A JSON object of a trace. Fields are validated when they are read; `line` is its line, or its
    position in a list."""

    def __init__(self, source: Source, line: int, values: Any) -> None:
        self.source = source
        self.line = line
        if not isinstance(values, Mapping):
            raise source.error(f"expected a JSON object, got {shown(values)}", line)
        self.values = values

    def get(self, name: str) -> Any:
        if name not in self.values:
            raise self.source.error(
                f"expected this field; there are {', '.join(map(str, self.values)) or 'none'}",
                self.line,
                name,
            )
        return self.values[name]

    def seconds(self, name: str, unit: str = "s") -> float:
        return as_seconds(self.source, self.line, name, self.get(name), unit)

    def tokens(self, name: str, least: int = 1) -> int:
        return as_tokens(self.source, self.line, name, self.get(name), least)


def as_seconds(source: Source, line: int, column: str, value: Any, unit: str = "s") -> float:
    """Return a time in seconds, from a number of `unit`s or an ISO 8601 date and time (UTC without
    a zone). Rejects negative times."""
    try:
        if isinstance(value, str) and value[4:5] == value[7:8] == "-":
            seconds = _timestamp(value)
        else:
            seconds = _number(value) * UNITS[unit]
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise source.error(
            f"expected a time in {unit} >= 0 or a date and time, got {shown(value)}", line, column
        )
    return seconds


def _timestamp(value: str) -> float:
    moment = datetime.fromisoformat(value)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def as_tokens(source: Source, line: int, column: str, value: Any, least: int = 1) -> int:
    """Return a number of tokens: a whole number from `least` to `MOST_TOKENS`."""
    return as_whole(source, line, column, value, least, MOST_TOKENS)


def as_share(source: Source, line: int, column: str, value: Any) -> float:
    """Return a probability."""
    try:
        share = _number(value)
    except (TypeError, ValueError, OverflowError):
        share = math.nan
    if not 0 <= share <= 1:
        raise source.error(f"expected a probability from 0 to 1, got {shown(value)}", line, column)
    return share


def as_whole(source: Source, line: int, column: str, value: Any, least: int, most: int) -> int:
    """Return a whole number; "12" and 12.0 are accepted, 12.5, true and "" are not."""
    try:
        number = _number(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not least <= number <= most or not number.is_integer():
        bounds = f"from {least:,} to {most:,}" if number > most else f"of at least {least:,}"
        raise source.error(f"expected a whole number {bounds}, got {shown(value)}", line, column)
    return int(number)


def _number(value: Any) -> float:
    """Convert to float, but reject what Python also accepts: True, and underscores in numbers."""
    if isinstance(value, bool) or (isinstance(value, str) and "_" in value):
        raise ValueError
    return float(value)


def without_failed(located: Iterable[Located], what: str) -> Contents:
    """Drop requests without an answer; a note counts them."""
    located = list(located)
    kept = [
        one for one in located if one.request.output_tokens > 0 and one.request.prompt_tokens > 0
    ]
    dropped = len(located) - len(kept)
    return Contents(kept, (f"left out {counted(dropped)} {what}",) if dropped else ())


def counted(rows: int) -> str:
    """Return "1 row" or "n rows", for a note."""
    return f"{rows} row{'' if rows == 1 else 's'}"
