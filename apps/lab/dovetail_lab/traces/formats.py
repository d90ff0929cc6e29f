"""`load_trace`: any trace file in, a `Trace` out. The format is told by the content, never by the file's name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from dovetail.checks import unicode_error
from dovetail_lab.traces.objects import CountTokens, read_bench_serve, read_mooncake, read_sharegpt, read_vllm_requests, read_vtc_measured
from dovetail_lab.traces.reading import Draft, Rows, Source, TraceError, counted, json_of, read_source
from dovetail_lab.traces.request import Trace, TraceRequest
from dovetail_lab.traces.tables import TABLES, Column, Table, almost, header_of, read_table, table_of

_OBJECTS: Mapping[str, Callable[[Source], Rows]] = {
    "mooncake": read_mooncake,
    "vllm_requests": read_vllm_requests,
    "vtc_measured": read_vtc_measured,
    "bench_serve": read_bench_serve,
    "sharegpt": read_sharegpt,
}
FORMATS = (*(table.name for table in TABLES), *_OBJECTS, "csv")


def load_trace(
    path: str | Path,
    *,
    format: str | None = None,
    columns: Mapping[str, Column] | None = None,
    count_tokens: CountTokens | None = None,
) -> Trace:
    """Read a trace; gzip and a byte-order mark are no trouble.

    `format`: one of `FORMATS`; `None` finds it out. `columns`: for CSV that nobody knows, from `tables.parse_columns`. `count_tokens`: a
    tokenizer, for formats that hold text. Rows out of order are sorted by arrival (of equals, the one above first), which a note tells; times
    count from the first arrival. Raises `TraceError` with file, line, column and what was expected.
    """
    source = read_source(path)
    reader = _reader(source, format, columns)
    rows = reader(source, count_tokens) if reader is read_sharegpt else reader(source)
    if not rows.drafts:
        raise source.error("expected at least one request, there is none")
    return _in_order(source, rows)


def _reader(source: Source, format: str | None, columns: Mapping[str, Column] | None) -> Callable[[Source], Rows]:
    if columns is not None:
        if format not in (None, "csv"):
            raise TraceError(f"a column map is for CSV, not for the format {format!r}")
        return partial(read_table, table=Table("csv", columns))
    if format is None:
        return _found_by_content(source)
    if format not in FORMATS:
        raise TraceError(f"unknown trace format {format!r}; there are {', '.join(FORMATS)}")
    if format == "csv":
        raise TraceError("the format csv needs a column map, such as arrival=ts:ms,prompt=in,output=out")
    table = next((table for table in TABLES if table.name == format), None)
    return partial(read_table, table=table) if table else _OBJECTS[format]


def _found_by_content(source: Source) -> Callable[[Source], Rows]:
    if source.text.lstrip().startswith(("{", "[")):
        return _OBJECTS[_kind_of_json(source)]
    table = table_of(header_of(source))
    if table is None:
        names, near = ", ".join(map(repr, header_of(source))), almost(header_of(source))
        raise source.error(f"no known format has the columns {names}{near}; say which is what, such as arrival=ts:ms,prompt=in,output=out", 1)
    return partial(read_table, table=table)


def _kind_of_json(source: Source) -> str:
    if source.text.lstrip().startswith("["):
        return "sharegpt"
    first_line = source.text.lstrip().split("\n", 1)[0]
    keys = _keys(first_line) or list(json_of(source))
    if "hash_ids" in keys:
        return "mooncake"
    if "queued_ts" in keys:
        return "vllm_requests"
    if "config" in keys and "result" in keys:
        return "vtc_measured"
    if "total_input_tokens" in keys or "input_lens" in keys:
        return "bench_serve"
    if "conversations" in keys or "messages" in keys:
        return "sharegpt"
    raise source.error(f"no known format has the fields {', '.join(map(repr, keys)) or 'none'}", 1)


def _keys(text: str) -> Sequence[str]:
    try:
        value: Any = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return ()
    return list(value) if isinstance(value, dict) else ()


def _in_order(source: Source, rows: Rows) -> Trace:
    """Sorted by arrival, with ids and a clock that begins at the first arrival."""
    numbered = sorted(enumerate(rows.drafts), key=lambda item: item[1].arrival_time)
    drafts = [draft for _, draft in numbered]
    early = sum(after.arrival_time < before.arrival_time for before, after in pairwise(rows.drafts))
    notes = rows.notes
    if early:
        notes += (f"sorted by arrival: {counted(early)} came before the one above",)
    if drafts[0].arrival_time == drafts[-1].arrival_time and len(drafts) > 1:
        notes += ("all requests arrive at once",)
    start = drafts[0].arrival_time
    _check_ids(replace(source, row_is=rows.row_is), rows.drafts)
    requests = tuple(_request(draft, str(number) if draft.id is None else draft.id, start) for number, draft in numbered)
    return Trace(Path(source.path).name, source.path, requests, notes)


def _request(draft: Draft, id: str, start: float) -> TraceRequest:
    """A file's times are rounded to microseconds: what its own clock adds below that, which counts from 1970, is no information."""
    return TraceRequest(
        id,
        round(draft.arrival_time - start, 6),
        draft.prompt_tokens,
        draft.output_tokens,
        draft.client,
        draft.priority,
        None if draft.deadline is None else round(draft.deadline - start, 6),
        draft.max_tokens,
        draft.predicted_tokens,
        draft.spans,
        None if draft.measured is None else draft.measured.shifted(-start),
        None if draft.ttft_deadline is None else round(draft.ttft_deadline - start, 6),
        draft.tbt_s,
    )


def _check_ids(source: Source, drafts: Sequence[Draft]) -> None:
    seen: dict[str, int] = {}
    for draft in drafts:
        for name in (draft.id, draft.client):
            if name is not None and unicode_error(name):
                raise source.error(f"expected ids and clients that are text, got half a surrogate pair in {name!r}", draft.line)
        if draft.id is not None and seen.setdefault(draft.id, draft.line) != draft.line:
            raise source.error(f"expected ids that differ, {draft.id!r} is also in {source.row_is} {seen[draft.id]}", draft.line)
