"""Metrics of the app: what its routes do to a request is counted once, and who may see the
figures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

import dovetail_models
from dovetail.errors import EngineDeadError
from dovetail.front.tokenizer import Tokenizer
from dovetail_server.app import create_app
from dovetail_server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(Path(dovetail_models.__file__).parent / "demo")


@pytest.fixture
def engine(tokenizer: Tokenizer) -> FakeEngine:
    return FakeEngine(tokenizer)


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[TestClient]:
    with TestClient(create_app(engine, front_end=3)) as client:
        yield client


def figures(client: TestClient) -> dict[str, float]:
    """All samples that aren't zero: by name, and the value of the label that tells more than the
    model and the front end."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    samples = [
        sample
        for family in families
        for sample in family.samples
        if sample.value and not sample.name.endswith("_bucket")
    ]
    assert {sample.labels["front_end"] for sample in samples} == {"3"}
    more = [
        [text for label, text in sample.labels.items() if label not in ("model_name", "front_end")]
        for sample in samples
    ]
    return {
        " ".join([sample.name, *labels]): sample.value
        for sample, labels in zip(samples, more, strict=True)
    }


def complete(client: TestClient, /, **fields: object) -> int:
    return client.post(
        "/v1/completions", json={"model": "fake", "prompt": "ROMEO:"} | fields
    ).status_code


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_is_counted_with_its_tokens_and_its_client(
    client: TestClient, stream: bool
) -> None:
    assert complete(client, stream=stream, client="alice", n=2) == 200
    told = figures(client)
    assert (
        told["vllm:request_success_total stop"]
        == told["vllm:time_to_first_token_seconds_count"]
        == 1
    )
    assert (
        told["dovetail_client_generation_tokens_total alice"]
        == told["vllm:generation_tokens_total"]
        >= 6
    )
    assert not any(name.startswith("dovetail_requests_refused") for name in told)


def test_what_is_wrong_with_a_request_is_counted_as_refused_and_not_as_ended(
    client: TestClient,
) -> None:
    assert complete(client, temperature=-1) == 400
    told = figures(client)
    assert told["dovetail_requests_refused_total 400"] == 1
    assert not any(name.startswith("vllm:request_success") for name in told)


def test_a_request_that_the_engine_does_not_take_is_refused(
    engine: FakeEngine, client: TestClient
) -> None:
    engine.refusal = EngineDeadError("a step failed")
    status = complete(client)
    told = figures(client)
    assert told[f"dovetail_requests_refused_total {status}"] == 1
    assert not any(name.startswith("vllm:request_success") for name in told)


def test_figures_need_a_key_and_the_page_itself_does_not(engine: FakeEngine) -> None:
    with TestClient(create_app(engine, ServerSettings(api_keys=("k",)))) as client:
        assert [
            client.get(path).status_code
            for path in ("/", "/page/page.css", "/page/page.js", "/page/icon.svg")
        ] == [200] * 4
        assert [
            client.get(path).status_code for path in ("/metrics", "/page/live", "/version")
        ] == [401] * 3
        assert (
            client.get("/page/live", headers={"authorization": "Bearer k"}).json()["model"]
            == "fake"
        )


def test_without_the_page_there_is_nothing_at_its_paths_and_metrics_stay(
    engine: FakeEngine,
) -> None:
    with TestClient(create_app(engine, ServerSettings(page=False))) as client:
        assert [
            client.get(path).status_code
            for path in ("/", "/page/live", "/page/page.js", "/metrics")
        ] == [404, 404, 404, 200]
