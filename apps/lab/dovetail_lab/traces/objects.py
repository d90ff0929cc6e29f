"""JSON traces: Mooncake, ShareGPT, results of vLLM's `bench serve`, measurements of vLLM, and those
of the VTC paper."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import replace
from itertools import accumulate
from typing import Any

from dovetail.errors import shown
from dovetail_lab.traces.images import read_images
from dovetail_lab.traces.reading import (
    Contents,
    JsonObject,
    Located,
    Source,
    as_seconds,
    json_of,
    json_rows,
    without_failed,
)
from dovetail_lab.traces.request import Measured, Span, TraceRequest, stream_of
from dovetail_lab.traces.transform import closed_loop_note

MOONCAKE_BLOCK = 512  # tokens per hash id

CountTokens = Callable[[str], int]


def read_mooncake(source: Source) -> Contents:
    """Read Mooncake's trace (Qin et al., FAST '25): equal hash ids are equal blocks of 512 tokens.
    Prompts may have images, as `read_images` reads them.
    Rows may belong to a `session_id` and wait for others, as in the traces of agents that AIPerf
    and Dynamo replay."""
    located: list[Located] = []
    named: dict[str, TraceRequest] = {}  # requests above, by `request_id`
    latest: dict[str, TraceRequest] = {}  # the latest of each session
    rows = list(json_rows(source))
    names = {_name(row, "request_id") for row in rows}
    for number, row in enumerate(rows):
        name = _name(row, "request_id")
        request = _in_session(
            row, replace(_mooncake(row), id=name or _free_id(number, names)), named, latest
        )
        located.append(Located(row.line, request))
        if name:
            named[name] = request
        if request.session is not None:
            latest[request.session] = request
    followers = closed_loop_note([one.request for one in located])
    return Contents(located, followers)


def _name(row: JsonObject, field: str) -> str | None:
    value = row.values.get(field)
    return None if value is None else str(value)


def _free_id(number: int, names: Set[str | None]) -> str:
    """Return an id for an unnamed row: its number, after as many underscores as make it differ from
    all names."""
    id = str(number)
    while id in names:
        id = f"_{id}"
    return id


def _in_session(
    row: JsonObject,
    request: TraceRequest,
    named: Mapping[str, TraceRequest],
    latest: Mapping[str, TraceRequest],
) -> TraceRequest:
    """Return the request with its session, and the requests above that it waits for: those of
    `wait_for`, or without a `timestamp` the one before in its session."""
    values = row.values
    session = _name(row, "session_id")
    after = values.get("wait_for") or []
    if not isinstance(after, list) or not all(isinstance(one, str | int) for one in after):
        raise row.source.error(
            f"expected a list of request_ids, got {shown(after)}", row.line, "wait_for"
        )
    if after and values.get("timestamp") is not None:
        raise row.source.error(
            "a row with wait_for arrives once those have ended: leave timestamp out",
            row.line,
            "timestamp",
        )
    for one in map(str, after):
        if one not in named:
            raise row.source.error(
                f"expected request_ids of rows above, got {shown(one)}", row.line, "wait_for"
            )
    waits = [named[str(one)] for one in after]
    has_time = "timestamp" in values or bool(after)
    if not has_time and session is not None and session in latest:
        waits = [latest[session]]
    gaps = {
        name: row.seconds(name, "ms")
        for name in ("delay", "tool_wait_ms")
        if values.get(name) is not None
    }
    for name, gap in gaps.items():
        if gap and not waits:
            raise row.source.error(
                "needs wait_for, or a row above in its session and no timestamp", row.line, name
            )
    total = sum(gaps.values())
    return replace(
        request,
        session=session,
        after=tuple(one.id for one in waits),
        gap_s=total,
        arrival_time=max(one.arrival_time for one in waits) + total
        if waits
        else row.seconds("timestamp", "ms"),
    )


def _mooncake(row: JsonObject) -> TraceRequest:
    tokens = row.tokens("input_length")
    output = row.tokens("output_length")
    images = read_images(row, tokens)
    session = row.values.get("session_id")
    if session is not None and "hash_ids" not in row.values:  # each turn goes on from all before it
        span = Span(stream_of("mooncake session", str(session)), 0, tokens + output)
        return TraceRequest("", 0.0, tokens, output, spans=(span,), images=images)
    ids = row.get("hash_ids")
    blocks = -(-tokens // MOONCAKE_BLOCK)
    if not isinstance(ids, list) or len(ids) != blocks or not all(type(id) is int for id in ids):
        raise row.source.error(
            f"expected {blocks} whole numbers, one for each {MOONCAKE_BLOCK} of {tokens} tokens, "
            f"got {shown(ids)}",
            row.line,
            "hash_ids",
        )
    last = tokens - (blocks - 1) * MOONCAKE_BLOCK
    spans = [Span(stream_of("mooncake", id), 0, MOONCAKE_BLOCK) for id in ids[:-1]] + [
        Span(stream_of("mooncake", ids[-1]), 0, last)
    ]
    return TraceRequest("", 0.0, tokens, output, spans=tuple(spans), images=images)


def read_vllm_requests(source: Source) -> Contents:
    """Read measurements of a running vLLM, one request per line. Its arrivals are wall-clock times,
    the others monotonic: the offset is chosen such that the shortest queueing time is zero."""
    rows = list(json_rows(source))
    offset = min(row.seconds("queued_ts") - row.seconds("arrival_time") for row in rows)

    def located(row: JsonObject) -> Located:
        scheduled, first, last = (
            row.seconds(name) - offset
            for name in ("scheduled_ts", "first_token_ts", "last_token_ts")
        )
        _in_order(row, row.seconds("arrival_time"), scheduled, first, last)
        measured = Measured(first, last, scheduled)
        tokens = row.tokens("input_toks"), row.tokens("output_toks")
        return Located(
            row.line,
            TraceRequest(
                str(row.get("request_id")), row.seconds("arrival_time"), *tokens, measured=measured
            ),
        )

    return Contents([located(row) for row in rows])


def _in_order(row: JsonObject, arrival: float, scheduled: float, first: float, last: float) -> None:
    if not arrival - 1e-6 <= scheduled <= first <= last:
        times = ", ".join(f"{time - arrival:.6f}" for time in (scheduled, first, last))
        raise row.source.error(
            f"expected arrival <= scheduled <= first token <= last token, got {times} s after "
            f"arrival",
            row.line,
        )


def read_vtc_measured(source: Source) -> Contents:
    """Read measurements of the artifact of VTC (Sheng et al., OSDI '24). Aborted requests have no
    first token and are left out."""
    responses = _list(JsonObject(source, 1, json_of(source)), "result", "responses")

    def located() -> Iterator[Located]:
        for row in _items(source, responses):
            arrival = row.seconds("req_time")
            failed = row.get("first_token_latency") == -1
            times = (
                None
                if failed
                else Measured(
                    arrival + row.seconds("first_token_latency"),
                    arrival + row.seconds("request_latency"),
                )
            )
            output = 0 if failed else row.tokens("output_len")
            client = str(row.get("adapter_dir"))
            yield Located(
                row.line,
                TraceRequest("", arrival, row.tokens("prompt_len"), output, client, measured=times),
            )

    return without_failed(located(), "of aborted requests")


def read_bench_serve(source: Source) -> Contents:
    """Read a result of vLLM's `bench serve`. Individual requests require --save-detailed; older
    versions lack start times."""
    result = JsonObject(source, 1, json_of(source)).values
    missing = [
        name for name in ("input_lens", "output_lens") if not isinstance(result.get(name), list)
    ]
    if missing:
        raise source.error(
            f"expected a list {missing[0]!r}: only a run of vLLM's bench serve with "
            f"--save-detailed writes it"
        )
    names = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "errors")
    columns = {name: result[name] for name in names if isinstance(result.get(name), list)}
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise source.error(
            f"expected lists of equal length, got "
            f"{', '.join(f'{name} {length}' for name, length in lengths.items())}"
        )
    requests = [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]
    return without_failed(map(_bench_serve, _items(source, requests)), "that failed")


def _bench_serve(row: JsonObject) -> Located:
    values = row.values
    arrival = row.seconds("start_times") if "start_times" in values else 0.0
    output = 0 if values.get("errors") else row.tokens("output_lens", 0)
    measured = None
    if output and "start_times" in values and "ttfts" in values:
        first = arrival + row.seconds("ttfts")
        gaps = values.get("itls") or []
        if not isinstance(gaps, list):
            raise row.source.error(
                f"expected a list of seconds, got {shown(gaps)}", row.line, "itls"
            )
        measured = Measured(
            first, first + sum(as_seconds(row.source, row.line, "itls", gap) for gap in gaps)
        )
    return Located(
        row.line, TraceRequest("", arrival, row.tokens("input_lens", 0), output, measured=measured)
    )


def count_words(text: str) -> int:
    """Count words as a substitute for tokens: English has about three words per four tokens."""
    return len(text.split())


def read_sharegpt(source: Source, count_tokens: CountTokens | None = None) -> Contents:
    """Read conversations in the format of ShareGPT (`conversations` of `from` and `value`) or of
    chat APIs (`messages` of `role` and `content`), as a list or one per line.

    Each answer is a request with the whole conversation so far as its prompt, so the turns of a
    conversation share it. There are no times. `count_tokens` returns a text's length; None counts
    words.
    """
    conversations = (
        _items(source, json_of(source))
        if source.text.lstrip().startswith("[")
        else json_rows(source)
    )
    count = count_tokens or count_words
    answers = [answer for row in conversations for answer in _answers(row, count)]
    notes = () if count_tokens else ("lengths are counted in words, since no tokenizer was given",)
    return Contents(answers, notes, "item" if source.text.lstrip().startswith("[") else "line")


def _answers(row: JsonObject, count: CountTokens) -> Iterator[Located]:
    name = str(row.values.get("id", row.line))
    said = [
        _turn(row, turn)
        for turn in _list(row, "conversations" if "conversations" in row.values else "messages")
    ]
    lengths = [count(text) for _, text in said]
    stream = stream_of("sharegpt", row.line)
    for index, before in enumerate(accumulate(lengths, initial=0)):
        is_answer = index < len(said) and said[index][0]
        if is_answer and before and lengths[index]:
            turn = sum(by_model for by_model, _ in said[:index])
            span = Span(stream, 0, before + lengths[index])
            yield Located(
                row.line, TraceRequest(f"{name}/{turn}", 0.0, before, lengths[index], spans=(span,))
            )


def _turn(row: JsonObject, turn: Any) -> tuple[bool, str]:
    """Return (True if the turn is the model's, its text)."""
    if isinstance(turn, dict):
        speaker = turn.get("from", turn.get("role"))
        text = turn.get("value", turn.get("content"))
        if isinstance(speaker, str) and isinstance(text, str):
            return speaker in ("gpt", "assistant", "chatgpt", "bing", "bard", "model"), text
    raise row.source.error(
        f"expected a turn with `from` and `value`, or `role` and `content`, as texts, got "
        f"{shown(turn)}",
        row.line,
    )


def _list(row: JsonObject, *names: str) -> list[Any]:
    """Return the list at that path of names."""
    value: Any = row.values
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    if not isinstance(value, list):
        raise row.source.error(
            f"expected a list at {'.'.join(names)}, got {shown(value)}", row.line
        )
    return value


def _items(source: Source, values: list[Any]) -> Iterator[JsonObject]:
    by_item = replace(source, row_is="item")
    return (JsonObject(by_item, number, value) for number, value in enumerate(values, 1))
