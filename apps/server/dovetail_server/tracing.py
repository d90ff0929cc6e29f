"""`RequestRecord`: the figures of one HTTP request, for its log line and its span. `Tracing`: an OpenTelemetry span for each request submitted to the
engine, with one for each of its phases, if enabled.

Attribute names are vLLM's; docs/serving/metrics.md lists them. The library comes with the extra `tracing`.
"""

from __future__ import annotations

import importlib.util
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from dovetail.errors import MissingExtraError
from dovetail.pooling import PoolingParams
from dovetail.request import RequestMetrics
from dovetail.sampling_params import SamplingParams

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from starlette.types import Scope

    from dovetail_server.protocol.openai_common import TokenCounts

SPAN = "llm_request"
_FLUSHED_S = 2.0  # timeout for sending spans at shutdown
_MODULES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")
_CONTEXT = ("traceparent", "tracestate")


@dataclass(slots=True)
class RequestRecord:
    """Times are seconds of `time.monotonic`."""

    began: float = field(default_factory=time.monotonic)
    first_output: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    model: str | None = None
    error: str | None = None
    gone: bool = False  # the client disconnected before the end
    params: SamplingParams | PoolingParams | None = None  # None: nothing was submitted to the engine
    answer_id: str = ""
    prompts: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    times: RequestMetrics | None = None  # of the first prompt, on the engine's clock

    def add(self, counts: TokenCounts, finish_reasons: Sequence[str], times: RequestMetrics | None) -> None:
        """Add the figures of one prompt."""
        self.prompt_tokens += counts.prompt
        self.cached_tokens += counts.cached
        self.completion_tokens += counts.completion
        self.finish_reasons += finish_reasons
        self.times = times if not self.prompts else self.times
        self.prompts += 1


def check_installed() -> None:
    """Raise `MissingExtraError` if OpenTelemetry isn't installed."""
    try:
        missing = [name for name in _MODULES if importlib.util.find_spec(name) is None]
    except ModuleNotFoundError as error:  # of a parent package
        missing = [str(error.name)]
    if missing:
        raise MissingExtraError.naming("tracing", f"otlp_traces_endpoint needs OpenTelemetry, of which {missing[0]} isn't installed")


class Tracing:
    """Creates spans, which a thread of OpenTelemetry exports."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "dovetail")})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("dovetail_server")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, endpoint: str) -> Tracing:
        """Export to an endpoint by OTLP over HTTP. Raises `MissingExtraError`."""
        check_installed()
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return cls(OTLPSpanExporter(endpoint=endpoint))

    def export(self, scope: Scope, record: RequestRecord, now: float) -> None:
        """Export the spans of a request that has ended. `now`: the time on the engine's clock."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        end_ns, took_s = time.time_ns(), time.monotonic() - record.began
        context = self._propagator.extract(_carrier(scope["headers"]))
        begin_ns = end_ns - round(took_s * 1e9)
        span = self._tracer.start_span(SPAN, context, SpanKind.SERVER, start_time=begin_ns)
        if span.is_recording():
            span.set_attributes(attributes_of(scope, record, took_s))
            if record.error is not None:
                span.set_status(Status(StatusCode.ERROR, record.error[:500]))
            inside = set_span_in_context(span)
            for name, begin, end in () if record.times is None else phases_of(record.times, now):
                first, last = (min(max(begin_ns, end_ns - round((now - at) * 1e9)), end_ns) for at in (begin, end))
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


def phases_of(times: RequestMetrics, now: float) -> list[tuple[str, float, float]]:
    """Return the phases of a request in order: "queue", "prefill", "decode" and "preempted", each with its begin and end in seconds on the engine's
    clock. Without gaps; the last one ends at `now` if the request hasn't finished. What is computed again after a preemption belongs to the phase
    that was interrupted."""
    reached = [("queue", times.arrival_time), ("prefill", times.first_scheduled_time), ("decode", times.first_token_time)]
    begins = [(name, begin) for name, begin in reached if begin is not None]
    last = now if times.finished_time is None else times.finished_time
    pauses = [(begin, last if end is None else end) for begin, end in times.pauses]
    cuts = sorted({last, *(at for _, at in begins), *(at for pause in pauses for at in pause)})
    phases: list[tuple[str, float, float]] = []
    for begin, end in pairwise(at for at in cuts if at <= last):
        paused = any(since <= begin < until for since, until in pauses)
        name = "preempted" if paused else next((name for name, since in reversed(begins) if since <= begin), "queue")
        if phases and phases[-1][0] == name:
            begin = phases.pop()[1]
        phases.append((name, begin, end))
    return phases


def attributes_of(scope: Scope, record: RequestRecord, took_s: float) -> dict[str, str | int | float | list[str]]:
    """Return the attributes of a request's span. Times are in seconds; unknown ones are omitted."""
    params, times = record.params, record.times
    if not isinstance(params, SamplingParams):
        params = SamplingParams(max_tokens=None)
    known: dict[str, str | int | float | list[str] | None] = {
        "gen_ai.request.id": scope.get("dovetail.request_id"),
        "gen_ai.response.id": record.answer_id,
        "gen_ai.response.model": record.model,
        "gen_ai.response.finish_reasons": record.finish_reasons,
        "gen_ai.request.n": params.n,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.usage.num_sequences": params.n * record.prompts,
        "gen_ai.usage.prompt_tokens": record.prompt_tokens,
        "gen_ai.usage.cached_tokens": record.cached_tokens,
        "gen_ai.usage.completion_tokens": record.completion_tokens,
        "gen_ai.latency.e2e": took_s,
        "gen_ai.latency.time_to_first_token": _between(record.began, record.first_output),
    }
    if times is not None:
        known |= {
            "gen_ai.latency.time_in_queue": _between(times.arrival_time, times.first_scheduled_time),
            "gen_ai.latency.time_in_model_prefill": _between(times.first_scheduled_time, times.first_token_time),
            "gen_ai.latency.time_in_model_decode": _between(times.first_token_time, times.finished_time),
            "gen_ai.latency.time_in_model_inference": _between(times.first_scheduled_time, times.finished_time),
        }
    return {name: value for name, value in known.items() if value is not None}


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin


def _carrier(headers: Iterable[tuple[bytes, bytes]]) -> Mapping[str, str]:
    """Return the trace context headers."""
    found = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
    return {name: found[name] for name in _CONTEXT if name in found}
