"""`Spans`: exports OpenTelemetry spans of requests and of their phases. The server and the observer
`otlp` use it.

The library comes with the extra `tracing`.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import threading
import time
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Self

from dovetail.errors import MissingExtraError
from dovetail.request.outputs import RequestMetrics

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.sdk.trace.id_generator import IdGenerator

SPAN = "llm_request"
Attributes = Mapping[str, str | int | float | list[str]]
Phase = tuple[str, float, float]  # name, begin and end in seconds on the engine's clock
_FLUSHED_S = 2.0  # timeout for sending spans at shutdown
_MODULES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")
_CONTEXT = ("traceparent", "tracestate")


def check_installed() -> None:
    """Raise `MissingExtraError` if OpenTelemetry isn't installed."""
    try:
        missing = [name for name in _MODULES if importlib.util.find_spec(name) is None]
    except ModuleNotFoundError as error:  # of a parent package
        missing = [str(error.name)]
    if missing:
        raise MissingExtraError.naming(
            "tracing", f"traces need OpenTelemetry, of which {missing[0]} isn't installed"
        )


class Spans:
    """Creates spans, which a thread of OpenTelemetry exports."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create(
            {"service.name": os.environ.get("OTEL_SERVICE_NAME", "dovetail")}
        )
        self._provider = TracerProvider(
            resource=resource, id_generator=_ids(), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("dovetail")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, endpoint: str) -> Self:
        """Export to an endpoint by OTLP over HTTP. Raises `MissingExtraError`."""
        check_installed()
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return cls(OTLPSpanExporter(endpoint=endpoint))

    def add(
        self,
        headers: Mapping[str, str],
        took_s: float,
        attributes: Attributes,
        phases: Iterable[Phase] = (),
        *,
        now: float = 0.0,
        error: str | None = None,
    ) -> None:
        """Export the spans of a request that has just ended, after `took_s` seconds.

        `headers`: those of the request, for the context of its trace, if they have one. `now`: the
        time on the engine's clock.
        """
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        end_ns = time.time_ns()
        begin_ns = end_ns - round(took_s * 1e9)
        context = self._propagator.extract(
            {name: headers[name] for name in _CONTEXT if name in headers}
        )
        span = self._tracer.start_span(SPAN, context, SpanKind.SERVER, start_time=begin_ns)
        if span.is_recording():
            span.set_attributes(attributes)
            if error is not None:
                span.set_status(Status(StatusCode.ERROR, error[:500]))
            inside = set_span_in_context(span)
            for name, begin, end in phases:
                first, last = (
                    min(max(begin_ns, end_ns - round((now - at) * 1e9)), end_ns)
                    for at in (begin, end)
                )
                self._tracer.start_span(f"{SPAN}.{name}", inside, start_time=first).end(last)
        span.end(end_ns)

    def flush(self) -> None:
        """Export all spans, blocking until the endpoint has answered."""
        self._provider.force_flush()

    def close(self) -> None:
        """Send remaining spans, for a short time at most."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(_FLUSHED_S)


def _ids() -> IdGenerator:
    """Return OpenTelemetry's generator of ids with a source of its own: the program's `random`
    stays as seeded."""
    from opentelemetry.sdk.trace.id_generator import IdGenerator

    class Ids(IdGenerator):
        def generate_span_id(self) -> int:
            return secrets.randbelow(2**64 - 1) + 1

        def generate_trace_id(self) -> int:
            return secrets.randbelow(2**128 - 1) + 1

    return Ids()


def phases_of(times: RequestMetrics, now: float) -> list[tuple[str, float, float]]:
    """Return the phases of a request in order: "queue", "prefill", "decode" and "preempted", each
    with its begin and end in seconds on the engine's clock. Without gaps; the last one ends at
    `now` if the request hasn't finished. What is computed again after a preemption belongs to the
    phase that was interrupted."""
    reached = [
        ("queue", times.arrival_time),
        ("prefill", times.first_scheduled_time),
        ("decode", times.first_token_time),
    ]
    begins = [(name, begin) for name, begin in reached if begin is not None]
    last = now if times.finished_time is None else times.finished_time
    pauses = [(begin, last if end is None else end) for begin, end in times.pauses]
    cuts = sorted({last, *(at for _, at in begins), *(at for pause in pauses for at in pause)})
    phases: list[tuple[str, float, float]] = []
    for begin, end in pairwise(at for at in cuts if at <= last):
        paused = any(since <= begin < until for since, until in pauses)
        name = (
            "preempted"
            if paused
            else next((name for name, since in reversed(begins) if since <= begin), "queue")
        )
        if phases and phases[-1][0] == name:
            begin = phases.pop()[1]
        phases.append((name, begin, end))
    return phases


def latencies(times: RequestMetrics) -> dict[str, float | None]:
    """Return the attributes for the times of a request, in seconds."""
    return {
        "gen_ai.latency.time_in_queue": between(times.arrival_time, times.first_scheduled_time),
        "gen_ai.latency.time_in_model_prefill": between(
            times.first_scheduled_time, times.first_token_time
        ),
        "gen_ai.latency.time_in_model_decode": between(times.first_token_time, times.finished_time),
        "gen_ai.latency.time_in_model_inference": between(
            times.first_scheduled_time, times.finished_time
        ),
    }


def between(begin: float | None, end: float | None) -> float | None:
    """Return the seconds from one time to another, if both are known."""
    return None if begin is None or end is None else end - begin


def known(
    attributes: Mapping[str, str | int | float | list[str] | None],
) -> dict[str, str | int | float | list[str]]:
    """Return the attributes that have a value."""
    return {name: value for name, value in attributes.items() if value is not None}
