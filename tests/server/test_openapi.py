"""`/openapi.json` says what the server does."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.routing import Route
from starlette.testclient import TestClient

from dovetail_server.app import create_app
from dovetail_server.protocol import openapi
from dovetail_server.protocol.advisory import Advisory
from dovetail_server.protocol.chat import ChatRequest
from dovetail_server.protocol.completions import CompletionRequest
from dovetail_server.protocol.messages import CountTokensRequest, MessagesRequest
from dovetail_server.protocol.openai_common import GenerationFields
from dovetail_server.protocol.openapi import ONLY, OPERATIONS, Operation
from dovetail_server.protocol.responses import ResponsesRequest
from dovetail_server.routes.service import described_path
from dovetail_server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine
from tests.server.serving import demo_tokenizer


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(demo_tokenizer())


def document(engine: FakeEngine, **settings: Any) -> dict[str, Any]:
    client = TestClient(create_app(engine, ServerSettings(**settings)))
    told: dict[str, Any] = client.get("/openapi.json", headers={"x-api-key": "secret"}).json()
    return told


@pytest.mark.slow("answers many requests")
def test_the_document_is_valid(engine: FakeEngine) -> None:
    import schemathesis

    for made in (document(engine), document(engine, api_keys=("secret",))):
        schemathesis.openapi.from_dict(made).validate()


def test_every_endpoint_is_described(engine: FakeEngine) -> None:
    routes = [
        route
        for route in create_app(engine).routes
        if isinstance(route, Route) and route.include_in_schema
    ]
    served = {
        (method.lower(), described_path(route))
        for route in routes
        for method in route.methods or ()
        if method != "HEAD"
    }
    paths = document(engine)["paths"]
    assert {(method, path) for path, methods in paths.items() for method in methods} == served
    assert {(operation.method, operation.path) for operation in OPERATIONS} == served


def test_the_document_is_made_once() -> None:
    facts: dict[str, Any] = {
        "paths": frozenset({"/health"}),
        "version": "1",
        "root_path": "",
        "has_keys": False,
    }
    assert openapi.document(**facts) is openapi.document(**facts)


def test_keys_are_asked_for_only_where_there_are_some(engine: FakeEngine) -> None:
    free, kept = document(engine), document(engine, api_keys=("secret",))
    assert "security" not in free["paths"]["/v1/messages"]["post"]
    assert kept["paths"]["/v1/messages"]["post"]["security"] == [{"bearer": []}, {"x_api_key": []}]
    assert "401" in kept["paths"]["/v1/messages"]["post"]["responses"]
    assert "security" not in kept["paths"]["/health"]["get"]


VALUES: dict[str, Any] = {  # of advisory fields that take few
    "metadata": {"user_id": "somebody"},
    "client_metadata": {"any": "thing"},
    "prompt_cache_options": {"any": "thing"},
    "store": True,
    "service_tier": "flex",
    "speed": "fast",
    "verbosity": "low",
    "text.verbosity": "high",
    "reasoning.summary": "detailed",
    "reasoning.generate_summary": "concise",
    "context_management": {
        "edits": [
            {"type": "clear_thinking_20251015", "keep": "all"},
            {"type": "clear_tool_uses_20250919"},
        ]
    },
    "stream_options.include_obfuscation": True,
    "tools[].defer_loading": True,
    "tools[].tools[].defer_loading": True,
    "tools[].eager_input_streaming": True,
    "thinking.display": "omitted",
    "messages[].content[].content[].source": {
        "type": "base64",
        "media_type": "image/png",
        "data": "",
    },
}
TEMPLATE = "{{ tools }}{{ messages[0].content }}"
USER = [{"role": "user", "content": "Hi"}]
BODIES: dict[type[Any], dict[str, Any]] = {
    CompletionRequest: {"prompt": "Hi"},
    ChatRequest: {"messages": USER},
    ResponsesRequest: {"input": "Hi"},
    MessagesRequest: {"messages": USER, "max_tokens": 5},
    CountTokensRequest: {"messages": USER},
}


def submitted(engine: FakeEngine, path: str, body: dict[str, Any]) -> Any:
    """Return the engine's request, or the answer if it got none."""
    engine.submitted.clear()
    template = {} if path == "/v1/completions" else {"chat_template": TEMPLATE}
    told = TestClient(create_app(engine)).post(path, json={**body, **template})
    assert told.status_code == 200, told.text
    return [
        (request.prompt, request.params, request.fields) for request in engine.submitted
    ] or told.json()


TOOLS: dict[type[Any], dict[str, Any]] = {
    ResponsesRequest: {"type": "function", "name": "f", "parameters": {"type": "object"}},
    MessagesRequest: {"name": "f", "input_schema": {"type": "object"}},
}
TOOLS[CountTokensRequest] = TOOLS[MessagesRequest]
OF_IMAGES = (
    ".detail",
    ".transformations",
)  # fields that `test_images` sends to a model that reads images
CASES = [
    (operation, one)
    for operation in OPERATIONS
    if operation.request in BODIES and issubclass(operation.request, GenerationFields)
    for one in operation.request.ADVISORY
    if not one.steers and not one.path.endswith(OF_IMAGES)
]


def with_field(kind: type[Any], path: str, value: Any) -> dict[str, Any]:
    """Return the body in which the field at a path has a value."""
    body: dict[str, Any] = {
        **BODIES[kind],
        **({"stream": True} if path.startswith("stream_options") else {}),
    }
    parent, _, name = path.rpartition(".")
    if parent == "tools[]":
        return body | {"tools": [{**TOOLS[kind], **({} if value is None else {name: value})}]}
    if parent == "tools[].tools[]":
        inner = {**TOOLS[kind], **({} if value is None else {name: value})}
        return body | {"tools": [{"type": "namespace", "name": "n", "tools": [inner]}]}
    if parent in ("system[]", "messages[].content[]"):
        block = {"type": "text", "text": "Hi", **({} if value is None else {name: value})}
        return body | (
            {"system": [block]}
            if parent == "system[]"
            else {"messages": [{"role": "user", "content": [block]}]}
        )
    if parent == "input[].output[]":
        kind_of = "input_image" if name == "image_url" else "input_file"
        part = {"type": kind_of, name: value} if value else {"type": "input_text", "text": "a"}
        result = {"type": "function_call_output", "call_id": "c", "output": [part]}
        return {"input": [{"role": "user", "content": "Hi"}, result]}
    if parent == "messages[].content[].content[]":
        part = {"type": "image", name: value} if value else {"type": "text", "text": "a"}
        result = {"type": "tool_result", "tool_use_id": "c", "content": [part]}
        return body | {"messages": [*USER, {"role": "user", "content": [result]}]}
    inner = {"type": "adaptive", name: value} if parent == "thinking" else {name: value}
    return body | ({} if value is None else {parent: inner} if parent else {name: value})


@pytest.mark.parametrize(("operation", "field"), CASES, ids=lambda one: one.path)
def test_advisory_fields_have_no_effect_and_the_answer_names_them(
    engine: FakeEngine, operation: Operation, field: Advisory
) -> None:
    kind = operation.request
    assert kind is not None
    value = VALUES.get(
        field.path, {"type": "ephemeral"} if field.path.endswith("cache_control") else "anything"
    )
    plain = submitted(engine, operation.path, with_field(kind, field.path, None))
    assert submitted(engine, operation.path, with_field(kind, field.path, value)) == plain
    client, refusing = (
        TestClient(create_app(engine)),
        TestClient(create_app(engine, ServerSettings(advisory_fields="refuse"))),
    )
    body = with_field(kind, field.path, value) | (
        {} if kind is CompletionRequest else {"chat_template": TEMPLATE}
    )
    assert client.post(operation.path, json=body).headers["x-dovetail-ignored"] == field.path
    answer = refusing.post(operation.path, json=body)
    assert answer.status_code == (400 if field.hint else 200), answer.text
    assert not field.hint or answer.json()["error"]["message"].startswith(
        f"{field.path}: {field.reason}"
    )
    for neutral in field.neutral:
        assert (
            "x-dovetail-ignored"
            not in refusing.post(operation.path, json=with_field(kind, field.path, neutral)).headers
        )


@pytest.mark.parametrize(
    "operation",
    [operation for operation in OPERATIONS if operation.request in BODIES],
    ids=lambda operation: operation.path,
)
def test_fields_with_few_values_take_these_and_refuse_others_by_name(
    engine: FakeEngine, operation: Operation
) -> None:
    assert operation.request is not None
    body, client = BODIES[operation.request], TestClient(create_app(engine))
    for name, values, reason in ONLY[operation.request]:
        for value in values:
            submitted(engine, operation.path, {**body, name: value})
        error = client.post(operation.path, json={**body, name: "no such value"}).json()["error"]
        assert error["message"].startswith((f"{name}: {reason}", f"{name}: expected")), error


def test_a_described_body_has_no_field_that_is_dropped(engine: FakeEngine) -> None:
    """Every body refuses fields that the document doesn't have."""
    made = document(engine)
    for path, methods in made["paths"].items():
        for operation in methods.values():
            if body := operation.get("requestBody"):
                name = body["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
                assert made["components"]["schemas"][name]["additionalProperties"] is False, path
