"""The server's metrics: what they count, that their number is bounded, and that Prometheus' own
parser reads them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import CollectorRegistry, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient

from dovetail.config.limits import Limits
from dovetail.end_reason import FinishReason
from dovetail.front.generation_config import GenerationDefaults
from dovetail.front.intake_facts import IntakeFacts
from dovetail.request.outputs import CompletionOutput, RequestMetrics, RequestOutput
from dovetail.serving import TierStats
from dovetail_server.engine import EngineInfo, Load, ServedEngine
from dovetail_server.frames import StepFrame, decode_to_front_end, encode
from dovetail_server.metric_parts import Histogram, token_bounds
from dovetail_server.metrics import MAX_CLIENT_CHARS, MAX_CLIENTS, OTHER, ServerMetrics
from dovetail_server.protocol.openai_common import TokenCounts
from dovetail_server.scrapes import Scrapes, metrics_route
from dovetail_server.tier_metrics import tier_figures, tier_metrics


@dataclass
class IdleEngine:
    """An idle engine with an info and a load. Its clock doesn't move."""

    load: Load = field(default_factory=Load)
    info: EngineInfo = field(
        default_factory=lambda: EngineInfo(
            "demo",
            IntakeFacts(Limits(), 256, 64, GenerationDefaults(), "local", "torch"),
            16,
            100,
            {"scheduler": "dovetail-llm:fcfs"},
            {},
            ("full",),
        )
    )

    def now(self) -> float:
        return 21.0


@dataclass
class Clock:
    """A clock that changes only when set."""

    time: float = 100.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(clock: Clock) -> ServerMetrics:
    load = Load(3, 2, held_pages=25, free_pages=65, cached_pages=10, held_by_group=(25,))
    return ServerMetrics(cast(ServedEngine, IdleEngine(load)), front_end=1, clock=clock)


def output(
    *tokens: int,
    reason: FinishReason | None = None,
    cached: int = 0,
    times: RequestMetrics | None = None,
) -> RequestOutput:
    """An output of one sample for each number of new tokens, of a prompt of ten tokens."""
    samples = [
        CompletionOutput(index, "", [7] * new, finish_reason=reason)
        for index, new in enumerate(tokens)
    ]
    return RequestOutput(
        "r", None, [1] * 10, samples, reason is not None, num_cached_tokens=cached, metrics=times
    )


def value(metrics: ServerMetrics, name: str, **labels: str) -> float | None:
    registry = CollectorRegistry()
    registry.register(metrics)
    return registry.get_sample_value(name, {"model_name": "demo", "front_end": "1", **labels})


def scraped(*metrics: ServerMetrics, **headers: str) -> Any:
    route = Route("/metrics", metrics_route(lambda: metrics))
    return TestClient(Starlette(routes=[route])).get("/metrics", headers=headers)


def test_a_request_is_timed_from_its_arrival_to_each_of_its_tokens(
    metrics: ServerMetrics, clock: Clock
) -> None:
    meter = metrics.meter("alice")
    clock.time += 0.5
    meter.saw(output(1, cached=4))
    for _ in range(4):
        clock.time += 0.125
        meter.saw(output(1))
    clock.time += 1
    meter.saw(output(0, reason="length"))
    assert value(metrics, "vllm:time_to_first_token_seconds_sum") == 0.5
    assert value(metrics, "vllm:inter_token_latency_seconds_sum") == 0.5
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == 4
    assert value(metrics, "vllm:request_time_per_output_token_seconds_sum") == 0.125
    assert value(metrics, "vllm:e2e_request_latency_seconds_sum") == 2.0
    assert value(metrics, "vllm:generation_tokens_total") == 5
    assert value(metrics, "vllm:prompt_tokens_total") == 10
    assert value(metrics, "vllm:prefix_cache_hits_total") == 4
    assert value(metrics, "vllm:request_success_total", finished_reason="length") == 1
    assert value(metrics, "dovetail_client_generation_tokens_total", client="alice") == 5


def test_the_engines_times_part_a_request_into_queue_prefill_and_decode(
    metrics: ServerMetrics,
) -> None:
    metrics.meter().saw(
        output(1, reason="stop", times=RequestMetrics(10.0, 12.0, 15.0, 19.0, preemptions=3))
    )
    parts = {
        name: value(metrics, f"vllm:request_{name}_time_seconds_sum")
        for name in ("queue", "prefill", "decode", "inference")
    }
    assert parts == {"queue": 2.0, "prefill": 3.0, "decode": 4.0, "inference": 7.0}
    assert value(metrics, "vllm:num_preemptions_total") == 3


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_request_that_goes_away_after_its_first_token_is_in_the_histograms_of_engine_times(
    metrics: ServerMetrics, reason: FinishReason
) -> None:
    meter = metrics.meter()
    meter.saw(output(1, times=RequestMetrics(10.0, 12.0, 15.0)))
    meter.saw_tokens(1)
    meter.ended(reason)
    parts = {
        name: value(metrics, f"vllm:request_{name}_time_seconds_sum")
        for name in ("queue", "prefill", "decode", "inference")
    }
    assert parts == {"queue": 2.0, "prefill": 3.0, "decode": 6.0, "inference": 9.0}


def test_drafts_are_those_of_the_engine() -> None:
    load = Load(draft_rows=10, draft_tokens=40, accepted_drafts=(8, 5), drafting_s=0.25)
    metrics = ServerMetrics(cast(ServedEngine, IdleEngine(load)), front_end=1)
    counts = {
        name: value(metrics, f"vllm:spec_decode_num_{name}_total")
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    }
    assert counts == {"drafts": 10, "draft_tokens": 40, "accepted_tokens": 13}
    assert [
        value(metrics, "vllm:spec_decode_num_accepted_tokens_per_pos_total", position=position)
        for position in "01"
    ] == [8, 5]
    assert value(metrics, "dovetail_drafting_seconds_total") == 0.25
    assert metrics.live()["accepted_drafts"] == (8, 5)


def test_an_output_of_several_tokens_is_one_gap(metrics: ServerMetrics, clock: Clock) -> None:
    meter = metrics.meter()
    meter.saw(output(1))
    clock.time += 0.5
    meter.saw_tokens(3)
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == 1
    assert value(metrics, "vllm:generation_tokens_total") == 4


def test_samples_of_one_prompt_have_a_gap_each_and_a_mean_of_their_own(
    metrics: ServerMetrics, clock: Clock
) -> None:
    meter = metrics.meter(samples=2)
    meter.saw(output(1, 1))
    clock.time += 1
    meter.saw(output(1, 1, reason="stop"))
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == 2
    assert value(metrics, "vllm:request_time_per_output_token_seconds_sum") == 1.0


def test_a_request_that_goes_away_ends_once_and_without_a_first_token_it_has_no_time_of_one(
    metrics: ServerMetrics,
) -> None:
    meter = metrics.meter()
    meter.ended("abort")
    meter.ended("error")
    assert value(metrics, "vllm:request_success_total", finished_reason="abort") == 1
    assert value(metrics, "vllm:request_success_total", finished_reason="error") == 0
    assert value(metrics, "vllm:time_to_first_token_seconds_count") == 0


def test_the_load_is_the_engines_at_the_time_of_the_question(metrics: ServerMetrics) -> None:
    assert value(metrics, "vllm:num_requests_running") == 3
    assert value(metrics, "vllm:num_requests_waiting") == 2
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0.25
    assert value(metrics, "dovetail_kv_pages", state="cached") == 10
    assert value(metrics, "dovetail_kv_group_pages", group="full") == 25
    assert value(metrics, "vllm:cache_config_info", block_size="16", num_gpu_blocks="100") == 1
    assert value(metrics, "dovetail_engine_info", part_scheduler="dovetail-llm:fcfs") == 1


def test_pages_are_told_apart_by_cache_group_if_the_manager_does() -> None:
    engine = IdleEngine(Load(held_pages=25, held_by_group=(20, 5)))
    engine.info = replace(engine.info, cache_groups=("full", "window 128"))
    metrics = ServerMetrics(cast(ServedEngine, engine), front_end=1)
    assert [
        value(metrics, "dovetail_kv_group_pages", group=group) for group in engine.info.cache_groups
    ] == [20, 5]
    assert metrics.live()["held_by_group"] == {"full": 20, "window 128": 5}
    engine.load = replace(engine.load, held_by_group=())
    assert metrics.live()["held_by_group"] == {}
    assert value(metrics, "dovetail_kv_group_pages", group="full") is None


def test_no_number_of_clients_and_no_name_makes_more_than_so_many_figures(
    metrics: ServerMetrics,
) -> None:
    for client in [
        "x" * (MAX_CLIENT_CHARS + 1),
        *(f"client {number}" for number in range(3 * MAX_CLIENTS)),
    ]:
        metrics.meter(client).saw(output(1, reason="stop"))
    assert len(metrics.clients) <= MAX_CLIENTS + 1
    assert sum(counts.requests for counts in metrics.clients.values()) == 3 * MAX_CLIENTS + 1
    assert metrics.clients[OTHER].requests > MAX_CLIENTS


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_a_scrape_is_in_the_format_that_was_asked_for(metrics: ServerMetrics, accept: str) -> None:
    metrics.request_refused(429)
    metrics.meter('a "quoted"\nname').saw(output(1, reason="stop"))
    answer = scraped(metrics, accept=accept)
    assert answer.headers["content-type"].startswith(accept.split(";")[0] or "text/plain")
    if not accept:
        families = {family.name: family for family in text_string_to_metric_families(answer.text)}
        assert families["vllm:time_to_first_token_seconds"].type == "histogram"
        assert {
            sample.labels["client"] for sample in families["dovetail_client_requests"].samples
        } == {'a "quoted"\nname'}
        assert [sample.value for sample in families["dovetail_requests_refused"].samples] == [1]


@given(st.lists(st.floats(0, 1e4)))
def test_a_histograms_buckets_hold_what_is_at_most_their_bound(values: list[float]) -> None:
    histogram = Histogram((0.5, 1, 10))
    for number in values:
        histogram.add(number)
    assert [count for _, count in histogram.cumulated()] == [
        sum(number <= bound for number in values) for bound in (0.5, 1, 10, math.inf)
    ]


def test_bounds_of_token_counts_are_round_and_end_with_the_longest_request() -> None:
    assert token_bounds(256) == (1, 2, 5, 10, 20, 50, 100, 200)
    assert token_bounds(1) == (1,)


def test_what_the_page_gets_holds_no_name_of_a_client_and_no_text(metrics: ServerMetrics) -> None:
    metrics.meter("a secret name").saw(output(2, reason="stop"))
    live = metrics.live()
    assert "secret" not in repr(live)
    assert (live["running"], live["generated_tokens"], live["finished"]["stop"]) == (3, 2, 1)


class _Counted(Collector):
    """Counts its scrapes, and those at once."""

    def __init__(self) -> None:
        self.scrapes = self.running = self.most_running = 0

    def collect(self) -> Iterator[Metric]:
        self.scrapes += 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        yield GaugeMetricFamily("scrapes", "Scrapes", value=self.scrapes)
        self.running -= 1


def test_scrapes_run_one_at_a_time_and_those_that_wait_share_one() -> None:
    counted, registry = _Counted(), CollectorRegistry()
    registry.register(counted)
    before = counted.scrapes

    async def scrape() -> None:
        scrapes = Scrapes(registry)
        formats = ["", "application/openmetrics-text"]
        first = asyncio.gather(*(scrapes.scrape(formats[number % 2]) for number in range(100)))
        await asyncio.sleep(0)
        told = await asyncio.gather(first, *(scrapes.scrape("") for _ in range(100)))
        assert counted.scrapes - before <= 3
        assert counted.most_running == 1
        text, _ = await scrapes.scrape("")
        assert text != told[-1][0], "what is asked for later is encoded anew"

    asyncio.run(scrape())


def test_k_and_v_beyond_the_gpu_are_counted() -> None:
    stats = TierStats(host_limit=64, saved_frames=5, missed={"damaged": 2})
    load = Load(tiers=stats)
    frame = decode_to_front_end(encode(StepFrame(0, 0.0, b"", b"", load)))
    assert isinstance(frame, StepFrame)
    assert frame.load == load
    families = {one.name: one for one in tier_metrics(stats, {"model_name": "m"})}
    [saved] = families["dovetail_kv_saved_frames"].samples
    assert (saved.labels, saved.value) == ({"model_name": "m"}, 5)
    [missed] = families["dovetail_kv_missed_restores"].samples
    assert (missed.labels["reason"], missed.value) == ("damaged", 2)


def test_the_page_gets_figures_of_the_tiers_if_there_are_any() -> None:
    stats = TierStats(host_limit=64, host_bytes=32, restored_tokens=7, missed={"late": 2})
    stats.stored_bytes["disk"] = 5
    stats.damaged_frames["host"] = 1
    assert tier_figures(stats) == {
        "host": {"limit": 64, "used": 32},
        "restored_tokens": 7,
        "missed": {"late": 2},
        "damaged": 1,
        "dropped": 0,
        "tiers": {"disk": {"stored": 5, "loaded": 0, "off": 0}},
    }


def test_usage_says_what_was_restored_if_anything_was() -> None:
    plain = TokenCounts(9, 2, 8).openai_usage()
    assert plain["prompt_tokens_details"] == {"cached_tokens": 8}
    restored = TokenCounts(9, 2, 8, restored=5).openai_usage()
    assert restored["prompt_tokens_details"] == {"cached_tokens": 8, "restored_tokens": 5}
