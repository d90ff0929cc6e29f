"""`Tracing`: a span of OpenTelemetry for each request that was given to the engine, if an operator asks for it.

Names are those that vLLM gives to the same things; docs/serving/metrics.md has the table. The library comes with the extra `tracing`.
"""

from __future__ import annotations

import importlib.util
import os
import threading
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from dovetail.errors import MissingExtraError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from dovetail_server.exchange import Exchange

SPAN = "llm_request"
_FLUSHED_S = 2.0  # for spans to be sent at the end; a collector that doesn't answer keeps no server alive
_MODULES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")
_CONTEXT = ("traceparent", "tracestate")


def check_installed() -> None:
    """Raises `MissingExtraError` if OpenTelemetry isn't there."""
    try:
        missing = [name for name in _MODULES if importlib.util.find_spec(name) is None]
    except ModuleNotFoundError as error:  # of a package above it
        missing = [str(error.name)]
    if missing:
        raise MissingExtraError.naming("tracing", f"otlp_traces_endpoint needs OpenTelemetry, of which {missing[0]} isn't installed")


class Tracing:
    """Makes spans and has them exported by a thread of the library's."""

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
        """Send spans to an endpoint, by OTLP over HTTP. Raises `MissingExtraError`."""
        check_installed()
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return cls(OTLPSpanExporter(endpoint=endpoint))

    def export(self, exchange: Exchange) -> None:
        """Export the span of a request that has ended."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        end_ns, took_s = time.time_ns(), time.monotonic() - exchange.record.began
        context = self._propagator.extract(_carrier(exchange.scope["headers"]))
        span = self._tracer.start_span(SPAN, context, SpanKind.SERVER, start_time=end_ns - round(took_s * 1e9))
        if span.is_recording():
            span.set_attributes(attributes_of(exchange, took_s))
            if exchange.record.error is not None:
                span.set_status(Status(StatusCode.ERROR, exchange.record.error[:500]))
        span.end(end_ns)

    def flush(self) -> None:
        """Have all spans exported, which takes as long as the endpoint does."""
        self._provider.force_flush()

    def close(self) -> None:
        """Send what isn't sent yet, as far as that is quick."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(_FLUSHED_S)


def attributes_of(exchange: Exchange, took_s: float) -> dict[str, str | int | float | list[str]]:
    """Return the facts of a request and its answer. Times are in seconds; what isn't known is left out."""
    record, first = exchange.record, exchange.jobs[0]
    parts = [job.part for job in exchange.jobs]
    params, times = first.params, first.part.times
    known: dict[str, str | int | float | list[str] | None] = {
        "gen_ai.request.id": exchange.scope.get("dovetail.request_id"),
        "gen_ai.response.id": exchange.answer_id,
        "gen_ai.response.model": record.model,
        "gen_ai.response.finish_reasons": [reason for part in parts for reason in part.finish_reasons],
        "gen_ai.request.n": params.n,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.usage.num_sequences": params.n * len(parts),
        "gen_ai.usage.prompt_tokens": record.prompt_tokens,
        "gen_ai.usage.cached_tokens": record.cached_tokens,
        "gen_ai.usage.completion_tokens": record.completion_tokens,
        "gen_ai.latency.e2e": took_s,
        "gen_ai.latency.time_to_first_token": _between(record.began, record.first_output),
    }
    if times is not None:  # of the first prompt, if there are several
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
    """Return the headers that say of which trace a request is part."""
    found = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
    return {name: found[name] for name in _CONTEXT if name in found}
