"""The observer `prometheus`: what it serves while an engine runs, that it ends with it, and that it
speaks as the server does."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from dataclasses import replace
from typing import cast

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from dovetail import LLM, SamplingParams
from dovetail.api.kv_cache import CacheGroup, PageCounts
from dovetail.api.observer import EngineStarted, EngineStopped, ObserverContext, StepFinished
from dovetail.errors import ConfigError
from dovetail_observers.prometheus import PrometheusObserver, PrometheusOptions
from dovetail_server.engine import ServedEngine
from dovetail_server.metrics import ServerMetrics
from tests.server.test_metrics import IdleEngine

STARTED = EngineStarted(0.0, "dovetail:fcfs", "dovetail:prefix", "dovetail:local", 10, 16, 1, {})
CONTEXT = ObserverContext(max_num_seqs=8, total_pages=10)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def scraped(port: int) -> dict[str, Metric]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return {
            family.name: family for family in text_string_to_metric_families(answer.read().decode())
        }


def value(families: dict[str, Metric], name: str, **labels: str) -> float:
    samples = [
        sample for family in families.values() for sample in family.samples if sample.name == name
    ]
    [found] = [sample for sample in samples if labels.items() <= sample.labels.items()]
    return float(found.value)


def test_a_running_engine_tells_what_it_has_done_and_a_stopped_one_is_gone() -> None:
    port = free_port()
    with LLM(
        "demo",
        max_model_len=64,
        observers=[{"name": "prometheus", "port": port, "model_name": "demo"}],
    ) as llm:
        llm.generate(["ROMEO:", "JULIET:"], SamplingParams(max_tokens=5, ignore_eos=True))
        families = scraped(port)
    assert value(families, "vllm:generation_tokens_total", model_name="demo") == 10
    assert value(families, "vllm:request_success_total", finished_reason="length") == 2
    assert value(families, "vllm:time_to_first_token_seconds_count") == 2
    assert value(families, "vllm:request_time_per_output_token_seconds_count") == 2
    assert value(families, "vllm:num_requests_running") == 0
    assert (
        value(families, "vllm:prompt_tokens_total")
        == value(families, "vllm:prefix_cache_queries_total")
        > 0
    )
    with pytest.raises(urllib.error.URLError):
        scraped(port)


def test_a_port_that_is_taken_is_named_before_the_engine_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"can't listen on 127.0.0.1:{port}"):
            PrometheusObserver(PrometheusOptions(port=port), CONTEXT).on_started(STARTED)


def test_port_zero_takes_a_free_one_for_each() -> None:
    observers = [PrometheusObserver(PrometheusOptions(), CONTEXT) for _ in range(2)]
    for observer in observers:
        observer.on_started(STARTED)
    assert observers[0].port != observers[1].port
    for observer in observers:
        assert (
            value(scraped(observer.port), "dovetail_engine_info", part_scheduler="dovetail:fcfs")
            == 1
        )
        observer.on_stopped(EngineStopped(1.0, None))


def test_pages_are_told_apart_by_cache_group() -> None:
    observer = PrometheusObserver(PrometheusOptions(model_name="m"), CONTEXT)
    observer.on_started(
        replace(STARTED, cache_groups=(CacheGroup((1,), 16), CacheGroup((0,), 16, 128)))
    )
    try:
        counts = PageCounts(empty=4, held=5, cached=1, held_by_group=(3, 2))
        observer.on_step(StepFinished(0, 0.0, 0.0, 1.0, 1, 0, 1, 0, 0, 1, 0, 0, counts, 0.0))
        families = scraped(observer.port)
    finally:
        observer.on_stopped(EngineStopped(1.0, None))
    assert [
        value(families, "dovetail_kv_group_pages", group=group) for group in ("full", "window 128")
    ] == [3, 2]
    assert value(families, "dovetail_kv_pages", state="held") == 5
    assert value(families, "vllm:kv_cache_usage_perc") == 5 / (5 + 4 + 1)


def test_drafts_are_counted_by_position() -> None:
    observer = PrometheusObserver(PrometheusOptions(model_name="m"), CONTEXT)
    observer.on_started(STARTED)
    try:
        step = StepFinished(0, 0.0, 0.0, 1.0, 1, 0, 1, 0, 0, 1, 0, 0, PageCounts(1, 0, 0), 0.0)
        for accepted in ((4, 0), (1, 2)):
            observer.on_step(replace(step, draft_rows=2, draft_tokens=8, accepted_drafts=accepted))
        families = scraped(observer.port)
    finally:
        observer.on_stopped(EngineStopped(1.0, None))
    counts = [
        value(families, f"vllm:spec_decode_num_{name}_total")
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    ]
    assert counts == [4, 16, 7]
    assert [
        value(families, "vllm:spec_decode_num_accepted_tokens_per_pos_total", position=position)
        for position in "0123"
    ] == [3, 2, 1, 1]


def test_what_it_has_in_common_with_the_server_is_of_the_same_type_and_bounds() -> None:
    def shape(families: list[Metric]) -> dict[str, tuple[str, list[str]]]:
        return {
            family.name: (
                family.type,
                sorted({sample.labels["le"] for sample in family.samples if "le" in sample.labels}),
            )
            for family in families
        }

    observer = PrometheusObserver(PrometheusOptions(), CONTEXT)
    ours, servers = (
        shape(list(observer.registry.collect())),
        shape(list(ServerMetrics(cast(ServedEngine, IdleEngine())).collect())),
    )
    common = ours.keys() & servers.keys()
    assert len(common) > 10
    assert {name: ours[name] for name in common} == {name: servers[name] for name in common}


def test_options_are_checked() -> None:
    with pytest.raises(ValidationError):
        PrometheusOptions(port=70_000)
