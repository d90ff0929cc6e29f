"""Observer `prometheus`: serves an engine's metrics to Prometheus at `http://host:port/metrics`,
without a server, until the engine stops.

Metrics that the server also has share its names and buckets; docs/serving/metrics.md lists both. A
request is counted when it ends, and inter-token latencies are missing: the server sees tokens, an
observer only steps.
"""

from __future__ import annotations

import logging
import socket
from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from pydantic import BaseModel, ConfigDict, Field

from dovetail.api.observer import (
    EngineStarted,
    EngineStopped,
    Observer,
    ObserverContext,
    RequestAdmitted,
    RequestFinished,
    StepFinished,
)
from dovetail.errors import ConfigError

logger = logging.getLogger("dovetail")

FIRST_TOKEN_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
TOKEN_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
REQUEST_S = (
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
    480,
    960,
    1920,
    7680,
)
STEP_TOKENS = tuple(2**power for power in (0, *range(3, 15)))


class PrometheusOptions(BaseModel):
    """Options of the observer `prometheus`."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    host: str = Field(
        default="127.0.0.1", description="Address to listen on; 0.0.0.0: all interfaces."
    )
    port: int = Field(
        default=0, ge=0, le=65535, description="Port to listen on; 0: a free one, which is logged."
    )
    model_name: str = Field(
        default="",
        description="Value of the label `model_name` of all metrics, for dashboards to filter by.",
    )


class PrometheusObserver(Observer):
    """Keeps metrics in its own registry and serves them from a thread. `port`: the port in use."""

    options: PrometheusOptions

    def __init__(self, options: PrometheusOptions, context: ObserverContext) -> None:
        super().__init__(options, context)
        self.registry = CollectorRegistry()
        self.port = options.port
        self._figures = Figures(self.registry, options.model_name)

    def on_started(self, event: EngineStarted) -> None:
        host = self.options.host
        try:
            self._server, self._thread = start_http_server(self.options.port, host, self.registry)
        except OSError as error:
            raise ConfigError(
                f"observer prometheus: can't listen on {host}:{self.options.port}: {error}; choose "
                f"another host or port"
            ) from error
        self.port = self._server.server_port
        self._figures.started(event)
        logger.info("metrics at http://%s:%d/metrics", host, self.port)

    def on_admitted(self, event: RequestAdmitted) -> None:
        self._figures.admitted(event)

    def on_step(self, event: StepFinished) -> None:
        self._figures.step(event)

    def on_finished(self, event: RequestFinished) -> None:
        self._figures.finished(event)

    def on_stopped(self, event: EngineStopped) -> None:
        with suppress(OSError):  # else its thread looks for its end twice a second
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Figures:
    """The metrics and their updates by events. Updated in the engine's thread, read by scraping
    threads."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        def counter(name: str, documentation: str, *labels: str) -> Counter:
            return Counter(name, documentation, ["model_name", *labels], registry=registry)

        def gauge(name: str, documentation: str, *labels: str) -> Gauge:
            return Gauge(name, documentation, ["model_name", *labels], registry=registry)

        def histogram(name: str, documentation: str, bounds: tuple[float, ...]) -> Histogram:
            return Histogram(
                name, documentation, ["model_name"], registry=registry, buckets=bounds
            ).labels(model_name)

        self._model = model_name
        self._running = gauge("vllm:num_requests_running", "Requests that hold blocks").labels(
            model_name
        )
        self._waiting = gauge(
            "vllm:num_requests_waiting", "Requests that have arrived and hold no blocks"
        ).labels(model_name)
        self._usage = gauge(
            "vllm:kv_cache_usage_perc", "Share of the KV pages that requests hold, 0 to 1"
        ).labels(model_name)
        self._pages = gauge("dovetail_kv_pages", "KV pages by state", "state")
        self._by_group = gauge(
            "dovetail_kv_group_pages", "KV pages that requests hold, by cache group", "group"
        )
        self._groups: tuple[str, ...] = ()  # names of the cache groups
        self._cache = gauge(
            "vllm:cache_config_info",
            "Size of the KV cache, as labels",
            "block_size",
            "num_gpu_blocks",
        )
        self._parts = gauge(
            "dovetail_engine_info",
            "Components in use, as labels",
            "part_scheduler",
            "part_kv_cache",
            "part_executor",
        )
        self._prompt = counter("vllm:prompt_tokens", "Prompt tokens of admitted requests").labels(
            model_name
        )
        self._generated = counter("vllm:generation_tokens", "Generated tokens").labels(model_name)
        self._queries = counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache"
        ).labels(model_name)
        self._hits = counter(
            "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache"
        ).labels(model_name)
        self._preemptions = counter("vllm:num_preemptions", "Preemptions").labels(model_name)
        self._success = counter(
            "vllm:request_success", "Finished requests, by reason", "finished_reason"
        )
        self._steps = histogram(
            "vllm:iteration_tokens_total", "Tokens computed by a step", STEP_TOKENS
        )
        self._recomputed = counter(
            "dovetail_recomputed_tokens", "Tokens recomputed after preemptions"
        ).labels(model_name)
        self._core = counter(
            "dovetail_core_seconds", "Seconds of work in the core: planning, batches, results"
        ).labels(model_name)
        self._device = counter(
            "dovetail_device_seconds",
            "Seconds from the start of a step on the device to its results",
        ).labels(model_name)
        self._draft_rows = counter(
            "vllm:spec_decode_num_drafts", "Rows of steps that checked drafts"
        ).labels(model_name)
        self._draft_tokens = counter("vllm:spec_decode_num_draft_tokens", "Drafts checked").labels(
            model_name
        )
        self._accepted = counter("vllm:spec_decode_num_accepted_tokens", "Drafts accepted").labels(
            model_name
        )
        self._accepted_at = counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts accepted, by position",
            "position",
        )
        self._first = histogram(
            "vllm:time_to_first_token_seconds",
            "Seconds from a request's arrival to its first token",
            FIRST_TOKEN_S,
        )
        self._per_token = histogram(
            "vllm:request_time_per_output_token_seconds",
            "A request's mean seconds from one token to the next",
            TOKEN_S,
        )
        self._latency = histogram(
            "vllm:e2e_request_latency_seconds",
            "Seconds from a request's arrival to its end",
            REQUEST_S,
        )
        self._queue = histogram(
            "vllm:request_queue_time_seconds",
            "Seconds from a request's arrival to its first step",
            REQUEST_S,
        )

    def started(self, event: EngineStarted) -> None:
        self._groups = tuple(group.name for group in event.cache_groups)
        self._cache.labels(self._model, str(event.block_size), str(event.total_pages)).set(1)
        self._parts.labels(self._model, event.scheduler, event.kv_cache, event.executor).set(1)

    def admitted(self, event: RequestAdmitted) -> None:
        if event.request.preemptions == 0:  # later lookups find the request's own tokens
            self._prompt.inc(event.request.prompt_tokens)
            self._queries.inc(event.request.prompt_tokens)
            self._hits.inc(event.cached_tokens)

    def step(self, event: StepFinished) -> None:
        pages = event.pages
        self._running.set(event.running)
        self._waiting.set(event.waiting)
        self._usage.set(pages.held / max(1, pages.held + pages.empty + pages.cached))
        for state, number in (
            ("held", pages.held),
            ("cached", pages.cached),
            ("free", pages.empty),
        ):
            self._pages.labels(self._model, state).set(number)
        for group, number in zip(self._groups, pages.held_by_group, strict=False):
            self._by_group.labels(self._model, group).set(number)
        self._generated.inc(event.generated_tokens)
        self._preemptions.inc(event.preempted)
        self._recomputed.inc(event.recomputed_tokens)
        self._steps.observe(event.prefill_tokens + event.decode_tokens)
        self._core.inc(event.core_s)
        self._device.inc(event.ended - event.started)
        if event.draft_rows:
            self._draft_rows.inc(event.draft_rows)
            self._draft_tokens.inc(event.draft_tokens)
            self._accepted.inc(sum(event.accepted_drafts))
            for position in range(max(event.accepted_drafts, default=0)):
                self._accepted_at.labels(self._model, str(position)).inc(
                    sum(count > position for count in event.accepted_drafts)
                )

    def finished(self, event: RequestFinished) -> None:
        request = event.request
        self._success.labels(self._model, event.finish_reason).inc()
        self._latency.observe(event.time - request.arrival_time)
        if request.first_scheduled_time is not None:
            self._queue.observe(request.first_scheduled_time - request.arrival_time)
        if request.first_token_time is not None:
            self._first.observe(request.first_token_time - request.arrival_time)
            if request.last_token_time is not None and request.generated > 1:
                self._per_token.observe(
                    (request.last_token_time - request.first_token_time) / (request.generated - 1)
                )
