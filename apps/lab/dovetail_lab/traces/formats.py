"""`load_trace`: read a trace file of any known format. The format is detected from the content, not
from the file's name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from dovetail.serving import unicode_error
from dovetail_lab.traces.objects import (
    CountTokens,
    read_bench_serve,
    read_mooncake,
    read_sharegpt,
    read_vllm_requests,
    read_vtc_measured,
)
from dovetail_lab.traces.reading import (
    Contents,
    Located,
    Source,
    TraceError,
    counted,
    json_of,
    read_source,
)
from dovetail_lab.traces.request import Trace, TraceRequest
from dovetail_lab.traces.tables import (
    TABLES,
    Column,
    Table,
    almost,
    header_of,
    read_table,
    table_of,
)
from dovetail_lab.traces.transform import shifted

_OBJECTS: Mapping[str, Callable[[Source], Contents]] = {
    "mooncake": read_mooncake,
    "vllm_requests": read_vllm_requests,
    "vtc_measured": read_vtc_measured,
    "bench_serve": read_bench_serve,
    "sharegpt": read_sharegpt,
}
# a format and the fields that identify it; the first match is taken
_MARKS: Sequence[tuple[str, set[str]]] = (
    ("mooncake", {"hash_ids"}),
    ("mooncake", {"session_id", "input_length"}),
    ("vllm_requests", {"queued_ts"}),
    ("vtc_measured", {"config", "result"}),
    ("bench_serve", {"total_input_tokens"}),
    ("bench_serve", {"input_lens"}),
    ("sharegpt", {"conversations"}),
    ("sharegpt", {"messages"}),
)
FORMATS = (*(table.name for table in TABLES), *_OBJECTS, "csv")


def load_trace(
    path: str | Path,
    *,
    format: str | None = None,
    columns: Mapping[str, Column] | None = None,
    count_tokens: CountTokens | None = None,
) -> Trace:
    """Read a trace, gzipped or not, with or without a byte-order mark.

    `format`: one of `FORMATS`; None detects it. `columns`: column map of an unknown CSV layout,
    from `tables.parse_columns`. `count_tokens`: a tokenizer, for formats that hold text. Rows are
    sorted by arrival (stable), and a note counts those out of order; times count from the first
    arrival. Raises `TraceError` with file, line, column and what was expected.
    """
    source = read_source(path)
    reader = _reader(source, format, columns)
    contents = reader(source, count_tokens) if reader is read_sharegpt else reader(source)
    if not contents.located:
        raise source.error("expected at least one request, there is none")
    return _in_order(source, contents)


def _reader(
    source: Source, format: str | None, columns: Mapping[str, Column] | None
) -> Callable[[Source], Contents]:
    if columns is not None:
        if format not in (None, "csv"):
            raise TraceError(f"a column map is for CSV, not for the format {format!r}")
        return partial(read_table, table=Table("csv", columns))
    if format is None:
        return _found_by_content(source)
    if format not in FORMATS:
        raise TraceError(f"unknown trace format {format!r}; there are {', '.join(FORMATS)}")
    if format == "csv":
        raise TraceError(
            "the format csv needs a column map, such as arrival=ts:ms,prompt=in,output=out"
        )
    table = next((table for table in TABLES if table.name == format), None)
    return partial(read_table, table=table) if table else _OBJECTS[format]


def _found_by_content(source: Source) -> Callable[[Source], Contents]:
    if source.text.lstrip().startswith(("{", "[")):
        return _OBJECTS[_kind_of_json(source)]
    table = table_of(header_of(source))
    if table is None:
        names = ", ".join(map(repr, header_of(source)))
        near = almost(header_of(source))
        raise source.error(
            f"no known format has the columns {names}{near}; map them, such as "
            f"arrival=ts:ms,prompt=in,output=out",
            1,
        )
    return partial(read_table, table=table)


def _kind_of_json(source: Source) -> str:
    if source.text.lstrip().startswith("["):
        return "sharegpt"
    keys = _keys(source.text.lstrip().split("\n", 1)[0]) or list(json_of(source))
    name = next((name for name, marks in _MARKS if marks <= set(keys)), None)
    if name is None:
        raise source.error(
            f"no known format has the fields {', '.join(map(repr, keys)) or 'none'}", 1
        )
    return name


def _keys(text: str) -> Sequence[str]:
    try:
        value: Any = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return ()
    return list(value) if isinstance(value, dict) else ()


def _in_order(source: Source, contents: Contents) -> Trace:
    """Sort by arrival, number requests without ids, and start the clock at the first arrival."""
    located = contents.located
    _check_ids(replace(source, row_is=contents.row_is), located)
    numbered = [
        replace(request, id=request.id or str(number))
        for number, (_, request) in enumerate(located)
    ]
    requests = sorted(numbered, key=lambda request: request.arrival_time)
    early = sum(after.arrival_time < before.arrival_time for before, after in pairwise(numbered))
    notes = contents.notes
    if early:
        notes += (f"sorted by arrival: {counted(early)} came before the one above",)
    start = requests[0].arrival_time
    if start == requests[-1].arrival_time and len(requests) > 1:
        notes += ("all requests arrive at once",)
    return Trace(
        Path(source.path).name,
        source.path,
        tuple(_starting_at(request, start) for request in requests),
        notes,
    )


def _starting_at(request: TraceRequest, start: float) -> TraceRequest:
    """Return the request on a clock that starts at `start`, in whole microseconds: a finer
    difference of two epoch times is rounding noise."""
    moved = shifted(request, -start)
    last, first = (
        None if time is None else round(time, 6) for time in (moved.deadline, moved.ttft_deadline)
    )
    return replace(
        moved, arrival_time=round(moved.arrival_time, 6), deadline=last, ttft_deadline=first
    )


def _check_ids(source: Source, located: Sequence[Located]) -> None:
    lines: dict[str, int] = {}
    for line, request in located:
        for name in (request.id, request.client):
            if name and unicode_error(name):
                raise source.error(
                    f"expected ids and clients that are text, got half a surrogate pair in "
                    f"{name!r}",
                    line,
                )
        if request.id and lines.setdefault(request.id, line) != line:
            raise source.error(
                f"expected ids that differ, {request.id!r} is also in {source.row_is} "
                f"{lines[request.id]}",
                line,
            )
