"""`/openapi.json` says what the server does."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from starlette.routing import Route
from starlette.testclient import TestClient

from dovetail_server.app import create_app
from dovetail_server.protocol.openapi import OPERATIONS
from dovetail_server.routes.openapi import described_path
from dovetail_server.settings import ServerSettings
from dovetail_server.testing import FakeEngine
from tests.server.serving import demo_tokenizer


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(demo_tokenizer())


def document(engine: FakeEngine, **settings: Any) -> dict[str, Any]:
    client = TestClient(create_app(engine, ServerSettings(**settings)))
    told: dict[str, Any] = client.get("/openapi.json", headers={"x-api-key": "secret"}).json()
    return told


def test_the_document_is_valid(engine: FakeEngine) -> None:
    for made in (document(engine), document(engine, api_keys=("secret",))):
        schemathesis.openapi.from_dict(made).validate()


def test_every_endpoint_is_described(engine: FakeEngine) -> None:
    routes = [route for route in create_app(engine).routes if isinstance(route, Route) and route.include_in_schema]
    served = {(method.lower(), described_path(route)) for route in routes for method in route.methods or () if method != "HEAD"}
    paths = document(engine)["paths"]
    assert {(method, path) for path, methods in paths.items() for method in methods} == served
    assert {(operation.method, operation.path) for operation in OPERATIONS} == served


def test_keys_are_asked_for_only_where_there_are_some(engine: FakeEngine) -> None:
    free, kept = document(engine), document(engine, api_keys=("secret",))
    assert "security" not in free["paths"]["/v1/messages"]["post"]
    assert kept["paths"]["/v1/messages"]["post"]["security"] == [{"bearer": []}, {"x_api_key": []}]
    assert "401" in kept["paths"]["/v1/messages"]["post"]["responses"]
    assert "security" not in kept["paths"]["/health"]["get"]


def test_a_described_body_has_no_field_that_is_dropped(engine: FakeEngine) -> None:
    """Every body refuses fields that the document doesn't have."""
    made = document(engine)
    for path, methods in made["paths"].items():
        for operation in methods.values():
            if body := operation.get("requestBody"):
                name = body["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
                assert made["components"]["schemas"][name]["additionalProperties"] is False, path
