"""Generates a trace from a workload's spec: the same spec and seed give the same trace on any
machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from dovetail_lab.traces import Span, Trace, TraceError, TraceImage, TraceRequest, load_trace
from dovetail_lab.traces.reading import MOST_TOKENS
from dovetail_lab.traces.request import stream_of
from dovetail_lab.traces.transform import arriving_at, closed_loop_note, has_share
from dovetail_lab.workloads.arrivals import MOST_ARRIVALS, Arrivals
from dovetail_lab.workloads.lengths import Distribution
from dovetail_lab.workloads.spec import Clients, Stream, WorkloadSpec


class _Picture(NamedTuple):
    digest: str
    rows: int


class _Chat(NamedTuple):
    """One arrival, with the content of each of its turns."""

    id: str
    arrival_time: float
    client: str | None
    adapter: str | None
    shared: int  # tokens that the client's prompts begin with, after `system`
    prompts: list[int]  # new tokens
    outputs: list[int]
    pauses: list[float]  # before each turn but the first
    images: list[_Picture | None]  # that of each turn
    deadline_s: float | None
    ttft_deadline_s: float | None
    tbt_s: float | None


def generate(
    spec: WorkloadSpec, seed: int = 0, *, name: str = "synthetic", source: str = ""
) -> Trace:
    """Generate the requests of all streams, by arrival. Arrivals, lengths and clients have separate
    random generators, so that changing the rate doesn't change lengths. Raises `TraceError` if
    there are no requests."""
    chats = [
        (chat, name) for name, stream in spec.streams.items() for chat in _chats(stream, name, seed)
    ]
    requests = [
        request for chat, name in chats for request in _turns(chat, spec.streams[name], name, seed)
    ]
    if not requests:
        raise TraceError(
            f"{source or name}: expected at least one request, but none arrives in that time"
        )
    requests.sort(key=lambda request: request.arrival_time)
    turns = (
        (f"{len(requests)} requests: each turn of {len(chats)} arrivals is one",)
        if len(requests) > len(chats)
        else ()
    )
    return Trace(
        name,
        source,
        tuple(requests),
        (f"synthetic, seed {seed}", *turns, *closed_loop_note(requests)),
        seeded=True,
    )


def with_arrivals(trace: Trace, arrivals: Arrivals, seed: int = 0) -> Trace:
    """Return the trace's requests with other arrival times; deadlines keep their distance from
    arrival. Requests that wait for others keep their gap. Measured times are dropped, since they
    belong to the old arrivals."""
    waiting = {request.id for request in trace if request.after}
    drawn = iter(
        arrivals.times(_rng(seed, "", "arrivals"), len(trace) - len(waiting), None).tolist()
    )
    made: dict[str, TraceRequest] = {}
    for request in trace:
        earliest = (
            max((made[id].arrival_time for id in request.after if id in made), default=0.0)
            + request.gap_s
        )
        made[request.id] = arriving_at(request, earliest if request.after else next(drawn))
    requests = tuple(
        sorted(made.values(), key=lambda request: request.arrival_time)
        if waiting
        else made.values()
    )
    return replace(
        trace,
        requests=requests,
        notes=(*trace.notes, f"arrivals replaced by {arrivals!r}, seed {seed}"),
        seeded=True,
    )


def _rng(seed: int, stream: str, purpose: str) -> np.random.Generator:
    return np.random.default_rng([seed, stream_of("workload", stream, purpose)])


def _chats(stream: Stream, name: str, seed: int) -> list[_Chat]:
    def draw(purpose: str, distribution: Distribution, count: int) -> list[float]:
        values: list[float] = distribution.draw(_rng(seed, name, purpose), count).tolist()
        return values

    times = stream.arrivals.times(
        _rng(seed, name, "arrivals"), stream.requests, stream.duration
    ).tolist()
    turns = [max(1, round(turns)) for turns in draw("turns", stream.turns, len(times))]
    ends = list(accumulate(turns))
    if sum(turns) > MOST_ARRIVALS:
        raise TraceError(f"more than {MOST_ARRIVALS:,} turns, the limit of a workload")
    prompts, outputs = _lengths(stream, name, seed, sum(turns))
    images = _images(stream, name, seed, sum(turns))
    pauses = draw("think", stream.think, sum(turns))
    if stream.tool is not None:
        calls = _rng(seed, name, "calls").random(sum(turns)) < stream.tool_share
        pauses = [
            tool if call else pause
            for pause, tool, call in zip(
                pauses, draw("tool", stream.tool, sum(turns)), calls.tolist(), strict=True
            )
        ]
    clients = (
        [name or None] * len(times)
        if stream.clients is None
        else _drawn(stream.clients, name or "client", _rng(seed, name, "clients"), len(times))
    )
    adapters: Sequence[str | None] = (
        [None] * len(times)
        if stream.adapters is None
        else _drawn(stream.adapters, name or "adapter", _rng(seed, name, "adapters"), len(times))
    )
    shared = _client_prefixes(stream, name, seed)
    objectives = (
        ("deadline", stream.deadline),
        ("ttft_deadline", stream.ttft_deadline),
        ("tbt", stream.tbt),
    )
    due = [
        [None] * len(times) if drawn is None else draw(name, drawn, len(times))
        for name, drawn in objectives
    ]
    return [
        _Chat(
            f"{name}-{index}" if name else str(index),
            time,
            client,
            adapter,
            shared.get(client, 0),
            prompts[end - count : end],
            outputs[end - count : end],
            pauses[end - count + 1 : end],
            images[end - count : end],
            *of_chat,
        )
        for index, (time, client, adapter, count, end, *of_chat) in enumerate(
            zip(times, clients, adapters, turns, ends, *due, strict=True)
        )
    ]


def _lengths(stream: Stream, name: str, seed: int, count: int) -> tuple[list[int], list[int]]:
    if stream.lengths is not None:
        trace = load_trace(stream.lengths)
        chosen = [
            trace.requests[index]
            for index in _rng(seed, name, "lengths").integers(len(trace), size=count)
        ]
        return [request.prompt_tokens for request in chosen], [
            request.output_tokens for request in chosen
        ]
    assert stream.prompt is not None  # checked by `Stream`
    assert stream.output is not None

    return (
        _tokens(stream.prompt, "prompt", name, seed, count),
        _tokens(stream.output, "output", name, seed, count),
    )


def _tokens(
    distribution: Distribution, purpose: str, name: str, seed: int, count: int
) -> list[int]:
    """Draw `count` numbers of tokens, each at least 1. Raises `TraceError` beyond the limit."""
    tokens = [
        max(1, round(tokens))
        for tokens in distribution.draw(_rng(seed, name, purpose), count).tolist()
    ]
    if max(tokens, default=0) > MOST_TOKENS:
        raise TraceError(
            f"{purpose}: {max(tokens):,} tokens were drawn; the limit is {MOST_TOKENS:,}"
        )
    return tokens


def _images(stream: Stream, name: str, seed: int, count: int) -> list[_Picture | None]:
    """Draw the image of each of `count` turns; None for a turn without."""
    if not stream.image_share:
        return [None] * count
    rows = _tokens(stream.image_rows, "image_rows", name, seed, stream.pictures or count)
    pictures = [_Picture(f"{name}/{number}", tokens) for number, tokens in enumerate(rows)]
    chosen = list(range(count))
    if stream.pictures is not None:
        chosen = _rng(seed, name, "pictures").integers(stream.pictures, size=count).tolist()
    has_one = _rng(seed, name, "images").random(count) < stream.image_share
    return [
        pictures[picture] if has else None
        for picture, has in zip(chosen, has_one.tolist(), strict=True)
    ]


def _drawn(
    clients: Clients, name: str, rng: np.random.Generator, count: int
) -> Sequence[str | None]:
    """Return the client, or adapter, of each of `count` arrivals."""
    shares = np.arange(1, clients.count + 1) ** -clients.skew
    chosen = rng.choice(clients.count, size=count, p=shares / shares.sum())
    return [_client(name, index) for index in chosen.tolist()]


def _client(stream: str, index: int) -> str:
    return f"{stream}-{index}"


def _client_prefixes(stream: Stream, name: str, seed: int) -> dict[str | None, int]:
    """Return the length of each client's prefix."""
    if stream.client_prefix is None or stream.clients is None:
        return {}
    lengths = _tokens(
        stream.client_prefix, "client_prefix", name, seed, min(stream.clients.count, MOST_ARRIVALS)
    )
    return {_client(name or "client", index): tokens for index, tokens in enumerate(lengths)}


def _turns(chat: _Chat, stream: Stream, stream_name: str, seed: int) -> list[TraceRequest]:
    """Return the requests of a chat. Each turn's prompt is the system prompt, the client's prefix,
    the chat so far, and new tokens, so answers must be text of the chat, too, and images of earlier
    turns come again."""
    requests = []
    before = stream.system + chat.shared
    said = 0
    images: tuple[TraceImage, ...] = ()
    time = chat.arrival_time
    for turn, (prompt, output) in enumerate(zip(chat.prompts, chat.outputs, strict=True)):
        time += chat.pauses[turn - 1] if turn else 0.0
        if (picture := chat.images[turn]) is not None:
            images = (*images, TraceImage(before + said, picture.rows, picture.digest))
            prompt += picture.rows
        spans = [Span(stream_of("system", stream_name), 0, stream.system)] if stream.system else []
        if chat.shared:
            spans.append(Span(stream_of("client", stream_name, chat.client or ""), 0, chat.shared))
        if len(chat.prompts) > 1:
            spans.append(Span(stream_of("chat", chat.id), 0, said + prompt + output))
        request_id = f"{chat.id}/{turn}" if len(chat.prompts) > 1 else chat.id
        waits = stream.closed_loop and turn > 0
        pools = has_share("pooling", request_id, stream.pooling_share, stream_name, seed)
        requests.append(
            TraceRequest(
                request_id,
                round(time, 6),
                before + said + prompt,
                1 if pools else output,
                client=chat.client,
                priority=stream.priority,
                deadline=None if chat.deadline_s is None else round(time + chat.deadline_s, 6),
                ttft_deadline=None
                if chat.ttft_deadline_s is None
                else round(time + chat.ttft_deadline_s, 6),
                tbt_s=chat.tbt_s,
                grammar=not pools
                and has_share("grammar", request_id, stream.grammar_share, stream_name, seed),
                spans=tuple(spans),
                session=chat.id if len(chat.prompts) > 1 else None,
                after=(f"{chat.id}/{turn - 1}",) if waits else (),
                gap_s=round(chat.pauses[turn - 1], 6) if waits else 0.0,
                images=images,
                adapter=chat.adapter,
                pools=pools,
            )
        )
        said += prompt + output
    return requests
