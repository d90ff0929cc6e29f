"""Built-in observers."""

from __future__ import annotations

from dovetail.api.component import ComponentSpec, hookimpl


@hookimpl
def dovetail_components() -> list[ComponentSpec]:
    return [
        ComponentSpec(
            kind="observer",
            name="log",
            api="1.0",
            target="dovetail_observers.log:LogObserver",
            options="dovetail_observers.log:LogOptions",
            summary="Logs a line every few seconds: requests, tokens per second, KV pool, "
            "preemptions",
        ),
        ComponentSpec(
            kind="observer",
            name="otlp",
            api="1.0",
            target="dovetail_observers.otlp:OtlpObserver",
            options="dovetail_observers.otlp:OtlpOptions",
            request_extra="dovetail_observers.otlp:TraceContext",
            summary="Exports an OpenTelemetry span for each request and its phases",
            requires=("opentelemetry-sdk>=1.27", "opentelemetry-exporter-otlp-proto-http>=1.27"),
        ),
        ComponentSpec(
            kind="observer",
            name="perfetto",
            api="1.0",
            target="dovetail_observers.perfetto:PerfettoObserver",
            options="dovetail_observers.perfetto:PerfettoOptions",
            summary="Writes a trace of steps and requests to a file for Perfetto",
        ),
        ComponentSpec(
            kind="observer",
            name="prometheus",
            api="1.0",
            target="dovetail_observers.prometheus:PrometheusObserver",
            options="dovetail_observers.prometheus:PrometheusOptions",
            summary="Serves Prometheus metrics, with vLLM's names, from an engine without a server",
            requires=("prometheus-client>=0.20",),
        ),
    ]
