"""Spans of requests: made with OpenTelemetry's own SDK, read from its exporter in memory or sent to
an endpoint that takes them."""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from starlette.testclient import TestClient
from typer.testing import CliRunner

from dovetail.api.spans import SPAN, phases_of
from dovetail.cli.app import app
from dovetail.request.outputs import RequestMetrics
from dovetail.request.sampling_params import SamplingParams
from dovetail_server.app import create_app
from dovetail_server.settings import ServerSettings
from dovetail_server.tracing import RequestRecord, Tracing
from tests.http_server import running
from tests.server.fake_engine import FakeEngine
from tests.server.serving import demo_tokenizer, serving_in_threads

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY = {"prompt": "a secret", "temperature": 0.5, "max_tokens": 9}


class Spans:
    """A server of a fake engine, and the spans of its requests."""

    def __init__(self) -> None:
        self.engine = FakeEngine(demo_tokenizer())
        app = create_app(self.engine)
        self._exporter = InMemorySpanExporter()
        self._tracing = Tracing(self._exporter)
        object.__setattr__(app.state.server, "tracing", self._tracing)
        self.client = TestClient(app)

    def of(self, body: dict[str, Any], **headers: str) -> list[ReadableSpan]:
        self._exporter.clear()
        self.client.post("/v1/completions", json=body, headers=headers)
        self._tracing.flush()
        return list(self._exporter.get_finished_spans())


@pytest.fixture
def spans() -> Iterator[Spans]:
    made = Spans()
    with made.client:
        yield made


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_one_span_with_its_tokens_and_times_and_without_its_prompt(
    spans: Spans, stream: bool
) -> None:
    [span] = spans.of({**BODY, "n": 2, "stream": stream}, **{"x-request-id": "mine"})
    told = dict(span.attributes or {})
    assert (span.name, span.kind, span.status.status_code) == (
        SPAN,
        SpanKind.SERVER,
        StatusCode.UNSET,
    )
    assert (told["gen_ai.request.id"], told["gen_ai.response.model"], told["gen_ai.request.n"]) == (
        "mine",
        "fake",
        2,
    )
    assert str(told["gen_ai.response.id"]).startswith("cmpl-")
    assert (told["gen_ai.request.temperature"], told["gen_ai.request.max_tokens"]) == (0.5, 9)
    assert told["gen_ai.usage.completion_tokens"] == 2 * 4
    assert told["gen_ai.response.finish_reasons"] == ("stop", "stop")
    assert 0 < told["gen_ai.latency.time_to_first_token"] <= told["gen_ai.latency.e2e"]  # type: ignore[operator]
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.end_time - span.start_time == pytest.approx(
        told["gen_ai.latency.e2e"] * 1e9, abs=1e3
    )  # type: ignore[operator]
    assert "secret" not in str(told)


def test_a_span_belongs_to_the_clients_trace(spans: Spans) -> None:
    [span] = spans.of(BODY, traceparent=f"00-{TRACE}-{PARENT}-01", tracestate="vendor=value")
    assert span.context is not None
    assert span.parent is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    assert span.context.trace_state["vendor"] == "value"


def test_a_client_that_samples_nothing_has_no_span(spans: Spans) -> None:
    assert spans.of(BODY, traceparent=f"00-{TRACE}-{PARENT}-00") == []


def test_a_request_that_never_reached_the_engine_has_no_span(spans: Spans) -> None:
    assert spans.of({**BODY, "temperature": -1}) == []


def test_a_request_that_fails_has_a_span_that_says_why(spans: Spans) -> None:
    spans.engine.finish = "error"
    [span] = spans.of(BODY)
    assert span.status.status_code is StatusCode.ERROR
    assert "the request failed" in str(span.status.description)


class Collector(HTTPServer):
    """An endpoint for OTLP over HTTP."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Taker)
        self.got: queue.Queue[ExportTraceServiceRequest] = queue.Queue()
        self.url = f"http://127.0.0.1:{self.server_port}/v1/traces"


class Taker(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers["content-length"]))
        self.server.got.put(ExportTraceServiceRequest.FromString(sent))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    with running(collector):
        yield collector


def test_a_server_sends_its_last_spans_at_its_end(collector: Collector) -> None:
    settings = ServerSettings(otlp_traces_endpoint=collector.url)
    with TestClient(create_app(FakeEngine(demo_tokenizer()), settings)) as client:
        assert client.post("/v1/completions", json=BODY).status_code == 200
    [resource] = collector.got.get(timeout=30).resource_spans
    assert {one.key: one.value.string_value for one in resource.resource.attributes}[
        "service.name"
    ] == "dovetail"
    assert [span.name for span in resource.scope_spans[0].spans] == [SPAN]


def test_a_real_engine_tells_how_long_its_request_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter)
    monkeypatch.setattr(Tracing, "to", lambda endpoint: tracing)
    with serving_in_threads(
        {"model": "demo", "max_num_seqs": 4},
        ServerSettings(otlp_traces_endpoint="http://127.0.0.1:9/"),
    ) as url:
        assert (
            httpx.post(
                f"{url}/v1/completions",
                json={"prompt": "ROMEO:", "max_tokens": 3, "ignore_eos": True},
            ).status_code
            == 200
        )
    tracing.flush()
    *phases, request = exporter.get_finished_spans()
    assert [span.name for span in phases] == [
        f"{SPAN}.{name}" for name in ("queue", "prefill", "decode")
    ]
    assert all(
        span.parent == request.context and span.start_time >= request.start_time for span in phases
    )
    assert [span.end_time for span in phases[:-1]] == [span.start_time for span in phases[1:]]
    assert phases[-1].end_time <= request.end_time
    told = dict(request.attributes or {})
    queue_s, prefill_s, decode_s = (
        told[f"gen_ai.latency.time_in_{what}"]
        for what in ("queue", "model_prefill", "model_decode")
    )
    assert queue_s >= 0 < prefill_s  # type: ignore[operator]
    assert queue_s + prefill_s + decode_s <= told["gen_ai.latency.e2e"]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (RequestMetrics(1.0), [("queue", 1.0, 9.0)]),
        (RequestMetrics(1.0, 2.0), [("queue", 1.0, 2.0), ("prefill", 2.0, 9.0)]),
        (
            RequestMetrics(1.0, 2.0, 4.0, 7.0),
            [("queue", 1.0, 2.0), ("prefill", 2.0, 4.0), ("decode", 4.0, 7.0)],
        ),
        (RequestMetrics(1.0, 1.0, 1.0, 1.0), []),
        (
            RequestMetrics(1.0, 2.0, 4.0, 7.0, 2, [(3.0, 3.5), (5.0, 6.0)]),
            [
                *(
                    ("queue", 1.0, 2.0),
                    ("prefill", 2.0, 3.0),
                    ("preempted", 3.0, 3.5),
                    ("prefill", 3.5, 4.0),
                ),
                *(("decode", 4.0, 5.0), ("preempted", 5.0, 6.0), ("decode", 6.0, 7.0)),
            ],
        ),
        (  # the first token was in flight
            RequestMetrics(1.0, 2.0, 4.0, None, 1, [(3.0, None)]),
            [("queue", 1.0, 2.0), ("prefill", 2.0, 3.0), ("preempted", 3.0, 9.0)],
        ),
    ],
    ids=lambda value: f"{len(value)} phases" if isinstance(value, list) else "",
)
def test_phases_have_neither_gaps_nor_overlaps(
    times: RequestMetrics, expected: list[tuple[str, float, float]]
) -> None:
    assert phases_of(times, 9.0) == expected


def test_spans_of_phases_lie_within_that_of_their_request() -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter)
    record = RequestRecord(
        began=time.monotonic() - 4.0,
        params=SamplingParams(),
        times=RequestMetrics(-50.0, 97.0, 98.0, 200.0, 1, [(98.5, 99.0)]),
    )
    tracing.export({"type": "http", "headers": []}, record, 100.0)
    tracing.flush()
    *phases, request = exporter.get_finished_spans()
    assert [span.name.removeprefix(f"{SPAN}.") for span in phases] == [
        "queue",
        "prefill",
        "decode",
        "preempted",
        "decode",
    ]
    assert (phases[0].start_time, phases[-1].end_time) == (request.start_time, request.end_time)
    assert phases[3].end_time - phases[3].start_time == pytest.approx(0.5e9, abs=1e3)


def test_without_the_library_one_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry.exporter")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)
    result = CliRunner().invoke(
        app, ["serve", "demo", "--otlp-traces-endpoint", "http://127.0.0.1:4318/v1/traces"]
    )
    assert result.exit_code == 2
    assert 'pip install "dovetail-llm[tracing]"' in " ".join(result.output.split())
