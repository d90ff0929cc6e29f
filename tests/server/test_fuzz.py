"""The server answers malformed bodies at every endpoint in `/openapi.json`, never with a 5xx, and
logs one line per request."""

from __future__ import annotations

import json
import logging
import queue
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from dovetail_server.protocol.openapi import OPERATIONS as ENDPOINTS
from dovetail_server.settings import ServerSettings
from tests.server.scripted import TEMPLATE
from tests.server.serving import PATIENCE_S, serving_in_threads
from tests.small_model import small_demo
from tests.support import examples

PATHS_WITH_BODIES = [operation.path for operation in ENDPOINTS if operation.request is not None]
SERVER_ERRORS = (b'"internal_error"', b'"server_error"', b'"api_error"')
OPERATIONS = st.deferred(lambda: st.sampled_from(_known))
_known: list[Any] = []  # the operations, once a server has told them


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of a small real model, which answers with a few tokens, and keeps files."""
    import schemathesis

    config = {
        "model": small_demo(),
        "max_model_len": 128,
        "max_num_seqs": 4,
        "adapters": {"slots": 1},
    }
    adapters = str(tmp_path_factory.mktemp("adapters"))
    settings = ServerSettings(
        batch_directory=str(tmp_path_factory.mktemp("batches")), adapter_directory=adapters
    )
    with serving_in_threads(config, settings, chat_template=TEMPLATE) as url:
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        _known[:] = [operation.ok() for operation in schema.get_all_operations()]
        yield url


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        yield session


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with httpx.Client() as client:
        yield client


class Lines(logging.Handler):
    """The lines that the server logs."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.put(record.getMessage())

    def only(self, request_id: str) -> dict[str, Any]:
        """The one line of this request, which is the last."""
        while True:
            # it may come after the answer
            line: dict[str, Any] = json.loads(self._lines.get(timeout=PATIENCE_S))
            if line["request_id"] == request_id:
                assert self._lines.empty()
                return line


@pytest.fixture(scope="module")
def lines(url: str) -> Iterator[Lines]:
    lines, logger = Lines(), logging.getLogger("dovetail.server")
    level, propagate = logger.level, logger.propagate
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    yield lines
    logger.removeHandler(lines)
    logger.setLevel(level)
    logger.propagate = propagate


@given(data=st.data())
@examples(quick=40, full=5_000)
@pytest.mark.slow("answers many requests")
def test_no_request_makes_the_server_fail(
    url: str, session: requests.Session, lines: Lines, data: st.DataObject
) -> None:
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    case = data.draw(data.draw(OPERATIONS).as_strategy(data.draw(st.sampled_from(GenerationMode))))
    answer = case.call(base_url=url, session=session, timeout=PATIENCE_S)
    case.validate_response(
        answer,
        checks=[
            not_a_server_error,
            checks.status_code_conformance,
            checks.content_type_conformance,
            checks.response_schema_conformance,
        ],
    )
    assert not any(word in answer.content for word in SERVER_ERRORS)  # amidst a stream
    assert lines.only(answer.headers["x-request-id"][0])["status"] == answer.status_code


@given(data=st.data())
@examples(quick=20, full=10_000)
def test_a_malformed_body_is_always_refused(
    url: str, session: requests.Session, lines: Lines, data: st.DataObject
) -> None:
    from schemathesis import GenerationMode

    operation = data.draw(OPERATIONS.filter(lambda operation: operation.path in PATHS_WITH_BODIES))
    case = data.draw(operation.as_strategy(GenerationMode.NEGATIVE))
    answer = case.call(base_url=url, session=session, timeout=PATIENCE_S)
    assert 400 <= answer.status_code < 500, case.body
    assert lines.only(answer.headers["x-request-id"][0])["status"] == answer.status_code


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(
    path=st.sampled_from(PATHS_WITH_BODIES),
    body=st.binary()
    | st.text().map(str.encode)
    | _JSON.map(lambda value: json.dumps(value).encode()),
)
@examples(quick=20, full=10_000)
def test_bytes_that_are_no_request_are_always_refused(
    url: str, client: httpx.Client, lines: Lines, path: str, body: bytes
) -> None:
    answer = client.post(url + path, content=body, timeout=PATIENCE_S)
    assert answer.status_code == 400
    assert lines.only(answer.headers["x-request-id"])["status"] == 400
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("path", PATHS_WITH_BODIES)
@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"messages":' * 100_000,
        b'{"a":"\\ud800"}',
        b"\xff\xfe",
        b"1" * 10_000,
        b'{"max_tokens":1e999}',
    ],
)
def test_bodies_that_break_parsers_are_refused(
    url: str, client: httpx.Client, lines: Lines, path: str, body: bytes
) -> None:
    answer = client.post(url + path, content=body, timeout=PATIENCE_S)
    assert answer.status_code == 400
    assert lines.only(answer.headers["x-request-id"])["status"] == 400
