"""The observer `otlp` exports spans of requests, in the traces that their headers name."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from dovetail import EngineArgs, LLMEngine, SamplingParams
from dovetail.api.spans import SPAN, Spans
from dovetail.compat import vllm as compat
from dovetail.errors import ConfigError, RequestError

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-other": "a"}
PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Spans of the engines that the test makes."""
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(Spans, "to", lambda endpoint: Spans(exporter))
    monkeypatch.setattr(exporter, "shutdown", lambda: None)  # which forgets them
    return exporter


@pytest.fixture
def engine(exported: InMemorySpanExporter) -> Iterator[LLMEngine]:
    args = EngineArgs("demo", max_model_len=64, otlp_traces_endpoint="http://127.0.0.1:9/")
    with compat.LLMEngine.from_engine_args(args) as engine:
        yield engine


def run(engine: LLMEngine) -> None:
    while engine.has_unfinished_requests():
        engine.step()


def test_a_request_is_a_span_of_the_trace_that_its_headers_name(
    engine: Any, exported: InMemorySpanExporter
) -> None:
    engine.add_request("a", "ROMEO:", PARAMS, None, None, None, HEADERS)
    engine.add_request("b", "ROMEO:", PARAMS)
    run(engine)
    engine.close()
    spans = exported.get_finished_spans()
    named = {span.attributes["gen_ai.request.id"]: span for span in spans if span.name == SPAN}
    assert f"{named['a'].context.trace_id:032x}" == TRACE
    assert f"{named['a'].parent.span_id:016x}" == PARENT
    assert named["b"].parent is None
    assert named["a"].attributes["gen_ai.usage.completion_tokens"] == 3
    phases = [span.name for span in spans if span.parent == named["a"].context]
    assert phases == [f"{SPAN}.{name}" for name in ("queue", "prefill", "decode")]


@pytest.mark.parametrize("headers", [{"traceparent": 3}, {"traceparent": "a" * 5000}, "00-1"])
def test_headers_that_are_none_are_refused(engine: Any, headers: Any) -> None:
    with pytest.raises(RequestError, match="trace_headers"):
        engine.add_request("a", "ROMEO:", PARAMS, trace_headers=headers)
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("headers", [{"traceparent": "nonsense"}, {}])
def test_headers_without_a_context_begin_a_trace(
    engine: Any, exported: InMemorySpanExporter, headers: Any
) -> None:
    engine.add_request("a", "ROMEO:", PARAMS, trace_headers=headers)
    run(engine)
    engine.close()
    [span] = [span for span in exported.get_finished_spans() if span.name == SPAN]
    assert span.parent is None


def test_without_the_observer_headers_are_left_out_with_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with LLMEngine.from_config("demo", max_model_len=64) as engine:
        for name in ("a", "b"):
            engine.add_request(name, "ROMEO:", PARAMS, trace_headers=HEADERS)
    lines = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert [line for line in lines if "trace_headers" in line] == [
        "trace_headers: left out, as no observer reads them: observers=[{'name': 'otlp', "
        "'endpoint': …}]"
    ]


def test_an_endpoint_is_a_url() -> None:
    with pytest.raises(ConfigError, match="endpoint"):
        LLMEngine.from_config("demo", observers=[{"name": "otlp", "endpoint": "collector:4318"}])
