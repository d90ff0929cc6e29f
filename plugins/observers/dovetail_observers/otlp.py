"""Exports an OpenTelemetry span for each request, with one for each of its phases, as
`dovetail serve` does.

`trace_headers` of a request (`traceparent`, `tracestate`) name the trace that its span belongs
to.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from dovetail.api.observer import (
    EngineStarted,
    EngineStopped,
    Observer,
    ObserverContext,
    RequestAdmitted,
    RequestFinished,
    RequestPreempted,
)
from dovetail.api.spans import Spans, between, known, latencies, phases_of
from dovetail.request.outputs import RequestMetrics

MAX_PAUSES = 100  # of a request; later preemptions have no phase of their own


class OtlpOptions(BaseModel):
    """Options of the observer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    endpoint: Annotated[
        str,
        Field(pattern="^https?://", description="Where spans are sent, by OTLP over HTTP."),
    ] = "http://localhost:4318/v1/traces"


class TraceContext(BaseModel):
    """The observer's part of a request's `extra`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    trace_headers: dict[
        Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=4096)]
    ] = Field(default_factory=dict, max_length=64)
    """Headers of the request; `traceparent` and `tracestate` are used."""


class OtlpObserver(Observer):
    """A span for each request, or sample of one."""

    options: OtlpOptions

    def __init__(self, options: OtlpOptions, context: ObserverContext) -> None:
        super().__init__(options, context)
        self._spans: Spans | None = None
        self._pauses: dict[str, list[tuple[float, float | None]]] = {}

    def on_started(self, event: EngineStarted) -> None:
        self._spans = Spans.to(self.options.endpoint)

    def on_preempted(self, event: RequestPreempted) -> None:
        pauses = self._pauses.setdefault(event.request.id, [])
        if len(pauses) < MAX_PAUSES:
            pauses.append((event.time, None))

    def on_admitted(self, event: RequestAdmitted) -> None:
        pauses = self._pauses.get(event.request.id)
        if pauses and pauses[-1][1] is None:
            pauses[-1] = (pauses[-1][0], event.time)

    def on_finished(self, event: RequestFinished) -> None:
        request = event.request
        pauses = self._pauses.pop(request.id, ())
        times = RequestMetrics(
            request.arrival_time,
            request.first_scheduled_time,
            request.first_token_time,
            event.time,
            pauses=pauses,
        )
        params = request.params
        took_s = max(0.0, event.time - request.arrival_time)
        attributes = known(
            {
                "gen_ai.request.id": request.parent or request.id,
                "gen_ai.response.id": request.id,
                "gen_ai.response.finish_reasons": [event.finish_reason],
                "gen_ai.request.n": params.n,
                "gen_ai.request.max_tokens": request.max_tokens,
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
                "gen_ai.usage.prompt_tokens": request.prompt_tokens,
                "gen_ai.usage.cached_tokens": request.cached_tokens,
                "gen_ai.usage.completion_tokens": request.generated,
                "gen_ai.latency.e2e": took_s,
                "gen_ai.latency.time_to_first_token": between(
                    request.arrival_time, request.first_token_time
                ),
                **latencies(times),
            }
        )
        failed = event.finish_reason in ("error", "rejected")
        carried = [
            one.trace_headers for one in request.extra.values() if isinstance(one, TraceContext)
        ]
        if self._spans is not None:
            self._spans.add(
                carried[0] if carried else {},
                took_s,
                attributes,
                phases_of(times, event.time),
                now=event.time,
                error=str(event.stop_reason) if failed else None,
            )

    def on_stopped(self, event: EngineStopped) -> None:
        if self._spans is not None:
            self._spans.close()
