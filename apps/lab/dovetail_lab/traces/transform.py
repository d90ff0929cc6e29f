"""Transform a trace before replay. Each function returns a new trace with a note on the change."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from dovetail_lab.traces.reading import TraceError
from dovetail_lab.traces.request import Trace, TraceRequest, stream_of

_WINDOW = re.compile(r"(?:(\d+(?:\.\d+)?)s)?:(?:(\d+(?:\.\d+)?)s)?")


def _changed(trace: Trace, requests: Iterable[TraceRequest], note: str) -> Trace:
    return replace(trace, requests=tuple(requests), notes=(*trace.notes, note))


def scale_rate(trace: Trace, factor: float) -> Trace:
    """Multiply the arrival rate by `factor`, keeping the pattern of gaps, the deadlines relative to
    arrival, and the requests in the window.

    Measured times are dropped. Raises `TraceError` unless factor > 0.
    """
    if not 0 < factor < math.inf:
        raise TraceError(f"the scale of the rate must be a finite number > 0, got {factor!r}")
    requests = (arriving_at(request, request.arrival_time / factor) for request in trace)
    window = None if trace.window is None else (trace.window[0] / factor, trace.window[1] / factor)
    return replace(_changed(trace, requests, f"arrival rate scaled by {factor:g}"), window=window)


def arriving_at(request: TraceRequest, time: float) -> TraceRequest:
    """Return the request with another arrival time, the same relative deadlines, and without
    measured times."""
    return replace(shifted(request, time - request.arrival_time), arrival_time=time, measured=None)


def slice_trace(trace: Trace, text: str) -> Trace:
    """Return a part of the trace: `100:200` by index, or `60s:120s` by arrival; either end may be
    omitted, negative indices count from the end. Times then count from the start of the slice; for
    a slice by index, that is its first arrival.

    Raises `TraceError` for another syntax, or an empty slice.
    """
    low, colon, high = (part.strip() for part in text.partition(":"))
    by_time = low.endswith("s") or high.endswith("s")
    try:
        all_times = all(not end or end.endswith("s") for end in (low, high))
        if not colon or (by_time and not all_times):
            raise ValueError
        if by_time:
            start = float(low[:-1]) if low else 0.0
            end = float(high[:-1]) if high else math.inf
            chosen = [request for request in trace if start <= request.arrival_time < end]
        else:
            chosen = list(trace.requests[int(low) if low else None : int(high) if high else None])
            start = chosen[0].arrival_time if chosen else 0.0
    except ValueError:
        raise TraceError(
            f"expected a slice like 100:200 (requests) or 60s:120s (seconds), got {text!r}"
        ) from None
    if not chosen:
        raise TraceError(
            f"the slice {text} of {trace.name} is empty: it has {len(trace)} requests in "
            f"{trace.duration_s:g} s"
        )
    return _changed(
        trace,
        (shifted(request, -start) for request in chosen),
        f"slice {text}: {len(chosen)} of {len(trace)} requests",
    )


def shifted(request: TraceRequest, by: float) -> TraceRequest:
    """Return the request with all its times `by` seconds later."""
    last, first = (
        None if instant is None else instant + by
        for instant in (request.deadline, request.ttft_deadline)
    )
    measured = None if request.measured is None else request.measured.shifted(by)
    return replace(
        request,
        arrival_time=request.arrival_time + by,
        deadline=last,
        ttft_deadline=first,
        measured=measured,
    )


def set_max_tokens(trace: Trace, value: str) -> Trace:
    """Set the `max_tokens` that policies see: `trace` keeps the trace's own (the true length if it
    has none), a number applies to all.

    An answer longer than that number is cut, as on a server; the note counts these. Raises
    `TraceError` for anything else.
    """
    if value == "trace":
        return _changed(trace, trace, "policies see max_tokens as the trace has it")
    if not value.isdecimal() or int(value) < 1:
        raise TraceError(f"max_tokens must be 'trace' or a whole number >= 1, got {value!r}")
    limit = int(value)
    cut = sum(request.output_tokens > limit for request in trace)
    requests = (
        replace(request, max_tokens=limit, output_tokens=min(request.output_tokens, limit))
        for request in trace
    )
    return _changed(
        trace,
        requests,
        f"policies see max_tokens={limit}"
        + (f", which cuts {cut} of {len(trace)} answers" if cut else ""),
    )


def set_grammar_share(trace: Trace, share: float, seed: int = 0) -> Trace:
    """Give that share of the requests a grammar, and none to the others. Requests with a grammar at
    a small share also have one at a larger.

    Raises `TraceError` unless 0 <= share <= 1.
    """
    if not 0 <= share <= 1:
        raise TraceError(f"the share of requests with a grammar must be from 0 to 1, got {share!r}")
    requests = [
        replace(request, grammar=has_share("grammar", request.id, share, trace.name, seed))
        for request in trace
    ]
    count = sum(request.grammar for request in requests)
    return _changed(
        trace,
        requests,
        f"{count} of {len(trace)} requests were given a grammar (a share of {share:g}, seed "
        f"{seed})",
    )


def set_window(trace: Trace, text: str) -> Trace:
    """Set the measured part of a run: `60s:600s`. Either end may be omitted; the window then starts
    or ends with the arrivals.

    Raises `TraceError` for another syntax, or if no request arrives in it.
    """
    match = _WINDOW.fullmatch(text)
    if match is None or text == ":":
        raise TraceError(
            f"expected a window like 60s:600s, or 60s: to leave out a warm-up, got {text!r}"
        )
    begin, end = (
        default if value is None else float(value)
        for value, default in zip(match.groups(), (0.0, trace.duration_s), strict=True)
    )
    count = sum(begin <= request.arrival_time < end for request in trace)
    if not count:
        raise TraceError(
            f"no request of {trace.name} arrives in the window {text}: arrivals end after "
            f"{trace.duration_s:g} s"
        )
    note = (
        f"measured from {begin:g} s to {end:g} s, in which {count} of {len(trace)} requests arrive"
    )
    return replace(_changed(trace, trace, note), window=(begin, end))


def closed_loop_note(requests: Sequence[TraceRequest]) -> tuple[str, ...]:
    """Return a note with the number of requests that wait for others, if there are any."""
    count = sum(bool(request.after) for request in requests)
    return (
        (f"closed loop: {count} of {len(requests)} requests arrive after the end of others",)
        if count
        else ()
    )


def has_share(what: str, request_id: str, share: float, name: str, seed: int) -> bool:
    """Return True if a request belongs to that share of the trace or stream `name`, for the purpose
    `what`; depends only on its id, not on other requests."""
    return stream_of(what, name, seed, request_id) < share * 2**64
