"""CSV traces; formats differ only in their columns."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dovetail_lab.traces.reading import (
    UNITS,
    Contents,
    Located,
    Source,
    TraceError,
    as_seconds,
    as_share,
    as_tokens,
    as_whole,
    without_failed,
)
from dovetail_lab.traces.request import TraceRequest

_MEANS = {  # field of a column map -> field of `TraceRequest`
    "arrival": "arrival_time",
    "prompt": "prompt_tokens",
    "output": "output_tokens",
    "id": "id",
    "client": "client",
    "priority": "priority",
    "deadline": "deadline",
    "ttft_deadline": "ttft_deadline",
    "tbt": "tbt_s",
    "max_tokens": "max_tokens",
    "predicted": "predicted_tokens",
    "acceptance": "acceptance",
    "adapter": "adapter",
}
FIELDS = tuple(_MEANS)
_REQUIRED = ("prompt", "output")
_TIMES = ("arrival", "deadline", "ttft_deadline", "tbt")
_PRIORITIES = 2**31  # absolute values are below this


class Column(NamedTuple):
    name: str
    unit: str = "s"  # of a time


@dataclass(frozen=True, slots=True)
class Table:
    """Known layout: field -> column. `fails`: describes rows without an answer, which are then
    dropped; None rejects them."""

    name: str
    columns: Mapping[str, Column]
    fails: str | None = None


def _columns(**columns: str) -> dict[str, Column]:
    return {field: Column(name) for field, name in columns.items()}


TABLES = (
    Table(
        "azure", _columns(arrival="TIMESTAMP", prompt="ContextTokens", output="GeneratedTokens")
    ),  # 2023 and 2024
    Table(
        "burstgpt",
        _columns(arrival="Timestamp", prompt="Request tokens", output="Response tokens"),
        fails="that failed, with no answer",
    ),
    Table(
        "vtc_arena",
        _columns(
            arrival="arrived_at",
            prompt="prompt_tokens",
            output="output_tokens",
            id="req_id",
            client="client",
        ),
    ),
    Table("sarathi", _columns(prompt="num_prefill_tokens", output="num_decode_tokens")),
    Table(
        "llmservingsim",
        _columns(arrival="arrived_at", prompt="input_tokens", output="output_tokens"),
    ),
)


def parse_columns(text: str) -> dict[str, Column]:
    """Parse a column map such as `arrival=ts:ms,prompt=in,output=out`; the unit of times defaults
    to s. Raises `TraceError`."""
    columns = {}
    for part in text.split(","):
        field, equals, column = (piece.strip() for piece in part.partition("="))
        if not equals or field not in FIELDS or not column:
            raise TraceError(
                f"column map: expected field=column with a field of {', '.join(FIELDS)}, got "
                f"{part.strip()!r}"
            )
        if field in columns:
            raise TraceError(f"column map: {field} is given twice")
        name, colon, unit = column.rpartition(":")
        columns[field] = (
            Column(name, unit) if colon and unit in UNITS and field in _TIMES else Column(column)
        )
    for field in _REQUIRED:
        if field not in columns:
            raise TraceError(
                f"column map: {field}=column is missing; every request needs "
                f"{' and '.join(_REQUIRED)}"
            )
    return columns


def table_of(header: Sequence[str]) -> Table | None:
    """Return the known layout whose columns are all present; None if there is none."""
    return next((table for table in TABLES if not missing_of(table, header)), None)


def missing_of(table: Table, header: Sequence[str]) -> list[str]:
    """Return the columns of `table` that are missing."""
    return [column.name for column in table.columns.values() if column.name not in header]


def almost(header: Sequence[str]) -> str:
    """Return a hint at known layouts with a single missing column; empty if there is none."""
    near = [(table, missing_of(table, header)) for table in TABLES]
    return "".join(
        f"; for {table.name} the column {missing[0]!r} is missing"
        for table, missing in near
        if len(missing) == 1 < len(table.columns) - 1
    )


def header_of(source: Source) -> list[str]:
    """Return the names in the first line of a CSV file."""
    return [name.strip() for name in next(csv.reader(source.text.split("\n", 1)[:1]), [])]


def read_table(source: Source, table: Table) -> Contents:
    """Read all rows of the file. Raises `TraceError` at the first that doesn't match `table`."""
    lines = csv.reader(io.StringIO(source.text), strict=True)
    try:
        located = list(_located(source, table, next(lines), lines))
    except csv.Error as error:
        raise source.error(f"expected CSV: {error}", lines.line_num) from None
    return without_failed(located, table.fails) if table.fails else Contents(located)


def _located(source: Source, table: Table, header: list[str], lines: Any) -> Iterator[Located]:
    """Yield the requests of `lines`, the csv reader after the header."""
    names = [name.strip() for name in header]
    width = len(header)
    for column in table.columns.values():
        if names.count(column.name) != 1:
            found = (
                f"it is there {names.count(column.name)} times"
                if column.name in names
                else f"there are {', '.join(map(repr, names))}"
            )
            raise source.error(f"expected a column {column.name!r}; {found}", 1)
    least = 0 if table.fails else 1
    cells = [
        (_MEANS[field], names.index(column.name), _parser(source, field, column, least))
        for field, column in table.columns.items()
    ]
    values: dict[str, Any] = {"id": "", "arrival_time": 0.0}
    for row in lines:
        line = lines.line_num
        if len(row) == width:
            values |= {name: parse(line, row[index].strip()) for name, index, parse in cells}
            yield Located(line, TraceRequest(**values))
        elif row:
            raise source.error(f"expected {width} columns, got {len(row)}", line)


def _parser(source: Source, field: str, column: Column, least: int) -> Callable[[int, str], Any]:
    """Return a function that turns (line, cell) into the field's value; an empty cell of an
    optional field is None."""
    if field == "arrival":
        return lambda line, cell: as_seconds(source, line, column.name, cell, column.unit)
    if field in _REQUIRED:
        return lambda line, cell: as_tokens(source, line, column.name, cell, least)
    if field in _TIMES:
        return lambda line, cell: (
            as_seconds(source, line, column.name, cell, column.unit) if cell else None
        )
    if field == "priority":
        return lambda line, cell: (
            as_whole(source, line, column.name, cell, -_PRIORITIES, _PRIORITIES) if cell else 0
        )
    if field in ("max_tokens", "predicted"):
        return lambda line, cell: as_tokens(source, line, column.name, cell) if cell else None
    if field == "acceptance":
        return lambda line, cell: as_share(source, line, column.name, cell) if cell else None
    return lambda line, cell: cell or ("" if field == "id" else None)
