"""The server's metrics: `ServerMetrics` aggregates what a `RequestMeter` measures of each request,
and `/metrics` exports it to Prometheus.

Names are vLLM's where the meaning is the same, so that gateways and dashboards work;
docs/serving/metrics.md lists them. A token costs a bisection and an addition: prometheus_client
only runs on a scrape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from dovetail.end_reason import FinishReason
from dovetail.request.lora import LoRARequest
from dovetail.request.outputs import RequestMetrics
from dovetail_server.engine import ServedEngine
from dovetail_server.metric_parts import (
    FIRST_TOKEN_S,
    REQUEST_S,
    TOKEN_S,
    Histogram,
    family,
    token_bounds,
)
from dovetail_server.request_meter import Finish, RequestMeter
from dovetail_server.tier_metrics import tier_figures, tier_metrics

MAX_CLIENTS = 100  # clients with separate figures; later ones are counted together
MAX_ADAPTERS = 1_000  # likewise
MAX_CLIENT_CHARS = 64  # clients with longer names are counted together, too
OTHER = "other"


class ClientCounts:
    """Counts of one client's requests."""

    __slots__ = ("cached_tokens", "generated_tokens", "prompt_tokens", "requests")

    def __init__(self) -> None:
        self.requests = self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0


class ServerMetrics(Collector):
    """Figures of one front end since its start, and the engine's load. Called by the event loop's
    thread; `collect` by any."""

    def __init__(
        self,
        engine: ServedEngine,
        model_name: str | None = None,
        *,
        front_end: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`model_name`: the label of all metrics; None: the model's name in `engine.yaml`."""
        self._engine = engine
        self._model_name = model_name or engine.info.model
        self._clock = clock
        self.front_end = front_end
        self.generated_tokens = self.prompt_tokens = self.cached_tokens = self.preemptions = 0
        self.finished: dict[FinishReason, int] = {
            "stop": 0,
            "length": 0,
            "abort": 0,
            "error": 0,
            "rejected": 0,
        }
        self.refused: dict[int, int] = {}  # by HTTP status
        self.clients: dict[str, ClientCounts] = {}
        self.adapters: dict[str, list[int]] = {}  # name -> finished requests, generated tokens
        self.first_token, self.gap, self.per_token = (
            Histogram(FIRST_TOKEN_S),
            Histogram(TOKEN_S),
            Histogram(TOKEN_S),
        )
        self.latency, self.queue, self.prefill, self.decode, self.inference = (
            Histogram(REQUEST_S) for _ in range(5)
        )
        largest = engine.info.intake.max_model_len
        self.request_prompt, self.request_generated = (
            Histogram(token_bounds(largest)),
            Histogram(token_bounds(largest)),
        )

    def meter(
        self,
        client: str | None = None,
        samples: int = 1,
        arrived: float | None = None,
        adapter: LoRARequest | None = None,
    ) -> RequestMeter:
        """Return the meter of a request for `samples` samples. `arrived`: on the metrics' clock;
        None: now."""
        return RequestMeter(
            self,
            client,
            samples,
            self._clock,
            self._clock() if arrived is None else arrived,
            adapter,
        )

    def request_began(
        self, first_token_s: float, prompt_tokens: int, cached_tokens: int, client: str | None
    ) -> None:
        """Count a request whose first token came `first_token_s` after its arrival."""
        self.first_token.add(first_token_s)
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
        counts = self._client(client)
        counts.prompt_tokens += prompt_tokens
        counts.cached_tokens += cached_tokens

    def request_finished(self, finish: Finish) -> None:
        self.finished[finish.reason] += 1
        self.latency.add(finish.latency_s)
        self.request_prompt.add(finish.prompt_tokens)
        self.request_generated.add(finish.generated_tokens)
        if finish.per_token_s is not None:
            self.per_token.add(finish.per_token_s)
        if finish.engine is not None:
            self._engine_times(finish.engine)
        if finish.adapter is not None:
            name = (
                finish.adapter
                if finish.adapter in self.adapters or len(self.adapters) < MAX_ADAPTERS
                else OTHER
            )
            ended = self.adapters.setdefault(name, [0, 0])
            ended[0] += 1
            ended[1] += finish.generated_tokens
        counts = self._client(finish.client)
        counts.requests += 1
        counts.generated_tokens += finish.generated_tokens

    def request_refused(self, status: int) -> None:
        """Count a request answered with an error status."""
        self.refused[status] = self.refused.get(status, 0) + 1

    def live(self) -> dict[str, Any]:
        """Return the figures for the page at `/`. Counts are since the start; the page computes
        rates."""
        load = self._engine.load
        return {
            "front_end": self.front_end,
            "time_s": self._clock(),
            "running": load.running,
            "waiting": load.waiting,
            "pages": {
                "held": load.held_pages,
                "cached": load.cached_pages,
                "free": load.free_pages,
            },
            "held_by_group": self._held_by_group(),
            "generated_tokens": self.generated_tokens,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "preemptions": self.preemptions,
            "draft_rows": load.draft_rows,
            "draft_tokens": load.draft_tokens,
            "accepted_drafts": load.accepted_drafts,
            "first_token": {"count": sum(self.first_token.counts), "sum_s": self.first_token.total},
            "gap": {"count": sum(self.gap.counts), "sum_s": self.gap.total},
            "finished": self.finished,
            "tiers": None if load.tiers is None else tier_figures(load.tiers),
        }

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics. Concurrent updates may make a histogram's sum and counts differ
        slightly."""
        yield from self._load()
        yield from self._counts()
        yield from self._drafts()
        if self._engine.load.tiers is not None:
            yield from tier_metrics(self._engine.load.tiers, self._labels)
        yield from self._histograms()
        yield from self._by_client()

    def _held_by_group(self) -> dict[str, int]:
        """Return the blocks that requests hold by the cache group's name; empty if the manager
        doesn't tell them apart."""
        return dict(
            zip(self._engine.info.cache_groups, self._engine.load.held_by_group, strict=False)
        )

    def _engine_times(self, times: RequestMetrics) -> None:
        self.preemptions += times.preemptions
        scheduled = times.first_scheduled_time
        first = times.first_token_time
        end = self._engine.now() if times.finished_time is None else times.finished_time
        if scheduled is not None:
            self.queue.add(scheduled - times.arrival_time)
            self.inference.add(end - scheduled)
            if first is not None:
                self.prefill.add(first - scheduled)
        if first is not None:
            self.decode.add(end - first)

    def _client(self, client: str | None) -> ClientCounts:
        name = client or ""
        if name not in self.clients and (
            len(self.clients) >= MAX_CLIENTS or len(name) > MAX_CLIENT_CHARS
        ):
            name = OTHER
        return self.clients.setdefault(name, ClientCounts())

    @property
    def _labels(self) -> dict[str, str]:
        return {"model_name": self._model_name, "front_end": str(self.front_end)}

    def _load(self) -> Iterator[Metric]:
        load = self._engine.load
        info = self._engine.info
        labels = self._labels
        yield family(
            GaugeMetricFamily,
            "vllm:num_requests_running",
            "Requests that hold blocks",
            labels,
            load.running,
        )
        yield family(
            GaugeMetricFamily,
            "vllm:num_requests_waiting",
            "Requests that have arrived and hold no blocks",
            labels,
            load.waiting,
        )
        used = load.held_pages / max(1, info.num_pages)
        yield family(
            GaugeMetricFamily,
            "vllm:kv_cache_usage_perc",
            "Share of the KV pages that requests hold, 0 to 1",
            labels,
            used,
        )
        pages = {"held": load.held_pages, "cached": load.cached_pages, "free": load.free_pages}
        yield family(
            GaugeMetricFamily, "dovetail_kv_pages", "KV pages by state", labels, pages, "state"
        )
        yield family(
            GaugeMetricFamily,
            "dovetail_kv_group_pages",
            "KV pages that requests hold, by cache group",
            labels,
            self._held_by_group(),
            "group",
        )
        cache = {"block_size": str(info.block_size), "num_gpu_blocks": str(info.num_pages)}
        yield family(
            GaugeMetricFamily,
            "vllm:cache_config_info",
            "Size of the KV cache, as labels",
            labels | cache,
            1,
        )
        parts = {f"part_{kind}": name for kind, name in sorted(info.parts.items())}
        yield family(
            GaugeMetricFamily,
            "dovetail_engine_info",
            "Components in use, as labels",
            labels | parts,
            1,
        )

    def _counts(self) -> Iterator[Metric]:
        for name, documentation, value in (
            (
                "vllm:prompt_tokens",
                "Prompt tokens of requests with a first token",
                self.prompt_tokens,
            ),
            ("vllm:generation_tokens", "Generated tokens", self.generated_tokens),
            (
                "vllm:prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache",
                self.prompt_tokens,
            ),
            (
                "vllm:prefix_cache_hits",
                "Prompt tokens found in the prefix cache",
                self.cached_tokens,
            ),
            (
                "vllm:num_preemptions",
                "Preemptions, counted when their request ends",
                self.preemptions,
            ),
        ):
            yield family(CounterMetricFamily, name, documentation, self._labels, value)
        yield family(
            CounterMetricFamily,
            "vllm:request_success",
            "Finished requests, by reason",
            self._labels,
            self.finished,
            "finished_reason",
        )
        refused = {str(status): number for status, number in list(self.refused.items())}
        yield family(
            CounterMetricFamily,
            "dovetail_requests_refused",
            "Requests answered with an error, by HTTP status",
            self._labels,
            refused,
            "status",
        )

    def _drafts(self) -> Iterator[Metric]:
        """Yield the engine's figures of speculative decoding, which all front ends have in
        common."""
        load = self._engine.load
        for name, documentation, value in (
            ("vllm:spec_decode_num_drafts", "Rows of steps that checked drafts", load.draft_rows),
            ("vllm:spec_decode_num_draft_tokens", "Drafts checked", load.draft_tokens),
            ("vllm:spec_decode_num_accepted_tokens", "Drafts accepted", sum(load.accepted_drafts)),
            (
                "dovetail_drafting_seconds",
                "Seconds that steps waited for the drafter",
                load.drafting_s,
            ),
        ):
            yield family(CounterMetricFamily, name, documentation, self._labels, value)
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        positions = {str(p): count for p, count in enumerate(load.accepted_drafts)}
        yield family(
            CounterMetricFamily,
            name,
            "Drafts accepted, by position",
            self._labels,
            positions,
            "position",
        )

    def _histograms(self) -> Iterator[Metric]:
        for name, documentation, histogram in (
            (
                "vllm:time_to_first_token_seconds",
                "Seconds from a request's arrival to its first token",
                self.first_token,
            ),
            (
                "vllm:inter_token_latency_seconds",
                "Seconds between two outputs of a sample",
                self.gap,
            ),
            (
                "vllm:request_time_per_output_token_seconds",
                "A request's mean seconds from one token to the next",
                self.per_token,
            ),
            (
                "vllm:e2e_request_latency_seconds",
                "Seconds from a request's arrival to its end",
                self.latency,
            ),
            (
                "vllm:request_queue_time_seconds",
                "Seconds from a request's arrival to its first step",
                self.queue,
            ),
            (
                "vllm:request_prefill_time_seconds",
                "Seconds from a request's first step to its first token",
                self.prefill,
            ),
            (
                "vllm:request_decode_time_seconds",
                "Seconds from a request's first token to its end",
                self.decode,
            ),
            (
                "vllm:request_inference_time_seconds",
                "Seconds from a request's first step to its end",
                self.inference,
            ),
            ("vllm:request_prompt_tokens", "A request's prompt tokens", self.request_prompt),
            (
                "vllm:request_generation_tokens",
                "A request's generated tokens",
                self.request_generated,
            ),
        ):
            family = HistogramMetricFamily(name, documentation, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), histogram.cumulated(), histogram.total)
            yield family

    def _by_client(self) -> Iterator[Metric]:
        clients = list(self.clients.items())
        for name, documentation, count in (
            ("dovetail_client_requests", "Finished requests, by client", "requests"),
            ("dovetail_client_prompt_tokens", "Prompt tokens, by client", "prompt_tokens"),
            (
                "dovetail_client_cached_tokens",
                "Prompt tokens found in the prefix cache, by client",
                "cached_tokens",
            ),
            (
                "dovetail_client_generation_tokens",
                "Generated tokens of finished requests, by client",
                "generated_tokens",
            ),
        ):
            values = {client: getattr(counts, count) for client, counts in clients}
            yield family(CounterMetricFamily, name, documentation, self._labels, values, "client")
        adapters = [(name, tuple(counts)) for name, counts in list(self.adapters.items())]
        for place, (name, documentation) in enumerate(
            (
                ("dovetail_adapter_requests", "Finished requests, by adapter"),
                (
                    "dovetail_adapter_generation_tokens",
                    "Generated tokens of finished requests, by adapter",
                ),
            )
        ):
            by_name = {adapter: counts[place] for adapter, counts in adapters}
            yield family(CounterMetricFamily, name, documentation, self._labels, by_name, "adapter")
