"""Request bodies: each must arrive within a time limit, and all together take bounded memory,
whatever their clients do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from dovetail_server import admission
from dovetail_server.app import create_app
from dovetail_server.protocol.openapi import OPERATIONS
from dovetail_server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving

pytestmark = pytest.mark.anyio
LARGE = 150_000  # bytes of a body
FORM = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'


def body_of(size: int, **fields: Any) -> bytes:
    return json.dumps({"prompt": "ROMEO:", "max_tokens": 2, "user": "u" * size, **fields}).encode()


async def begun(
    url: str, body: bytes, path: str = "/v1/completions", content_type: str = "application/json"
) -> asyncio.StreamWriter:
    """A connection on which a body has begun to come."""
    host, port = url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
        f"{content_type}\r\nContent-Length: {len(body) + 1}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    return writer


async def until_held(app: Any, held: Callable[[int], bool]) -> None:
    while not held(app.state.server.bodies.held):
        await asyncio.sleep(0.01)


async def test_bodies_of_all_connections_together_are_bounded(
    fake: Callable[..., FakeEngine],
) -> None:
    app = create_app(fake(), ServerSettings(max_received_bytes=2 * LARGE + 10_000))
    async with serving(app) as url, httpx.AsyncClient(base_url=url) as http:
        unfinished = [await begun(url, b"[" + b" " * LARGE) for _ in range(2)]
        await until_held(app, lambda held: held > 2 * LARGE)

        answer = await http.post(
            "/v1/completions", content=body_of(LARGE), headers={"content-type": "application/json"}
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_requests")
        assert "max_received_bytes" in answer.text
        assert int(answer.headers["retry-after"]) >= 1
        small = await http.post(
            "/v1/completions", content=body_of(60_000), headers={"content-type": "application/json"}
        )
        assert small.status_code == 200

        unfinished[0].close()
        await until_held(app, lambda held: held < 2 * LARGE)
        answer = await http.post(
            "/v1/completions", content=body_of(LARGE), headers={"content-type": "application/json"}
        )
        assert answer.status_code == 200
        unfinished[1].close()
        await until_held(app, lambda held: held == 0)


async def test_a_body_is_held_no_longer_than_its_prompt_is_made(
    fake: Callable[..., FakeEngine],
) -> None:
    engine = fake("one", paced=True)
    app = create_app(engine)
    async with serving(app) as url, httpx.AsyncClient(base_url=url) as http:
        asking = asyncio.create_task(
            http.post(
                "/v1/completions",
                content=body_of(LARGE),
                headers={"content-type": "application/json"},
            )
        )
        await engine.until_requests(1)
        assert app.state.server.bodies.held == 0
        engine.step()
        engine.step()
        assert (await asking).status_code == 200


async def test_of_a_file_only_what_is_in_memory_counts(
    fake: Callable[..., FakeEngine], tmp_path: Any
) -> None:
    app = create_app(fake(), ServerSettings(batch_directory=str(tmp_path)))
    async with serving(app) as url:
        writer = await begun(
            url, FORM + b"x" * 10_000_000, "/v1/files", "multipart/form-data; boundary=b"
        )
        await until_held(app, lambda held: held > 1_000_000)
        await asyncio.wait_for(writer.drain(), 10)
        assert app.state.server.bodies.held < 2_000_000
        writer.close()
        await until_held(app, lambda held: held == 0)


@pytest.mark.parametrize("trailer", [b"", b"0\r\na:"])
@pytest.mark.parametrize(
    ("path", "content_type", "begin"),
    [
        ("/v1/completions", "application/json", b"{"),
        ("/tokenize", "application/json", b""),
        ("/v1/files", "multipart/form-data; boundary=b", FORM),
    ],
)
async def test_a_body_that_takes_too_long_is_reported(
    fake: Callable[..., FakeEngine],
    path: str,
    content_type: str,
    begin: bytes,
    trailer: bytes,
    tmp_path: Any,
) -> None:
    async with serving(
        fake(), ServerSettings(body_timeout_s=0.05, batch_directory=str(tmp_path))
    ) as url:
        reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
            f"{content_type}\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        writer.write(
            head.encode() + (b"%x\r\n%b\r\n" % (len(begin), begin) if begin else b"") + trailer
        )
        answer = await reader.readuntil(b"}")
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"body_timeout_s" in answer
        writer.close()


async def test_a_body_that_comes_steadily_has_the_time_that_its_size_takes(
    fake: Callable[..., FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "SLOWEST_BYTES_S", 1.0)
    async with (
        serving(fake(), ServerSettings(body_timeout_s=0.05)) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):

        async def slowly() -> AsyncIterator[bytes]:
            yield body_of(100)[:-1]
            await asyncio.sleep(0.1)
            yield b"}"

        assert (
            await http.post(
                "/v1/completions", content=slowly(), headers={"content-type": "application/json"}
            )
        ).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [1] * 2000}, "stop_token_ids"),
        ("/v1/completions", {"prompt": "a", "stop": ["a"] * 2000}, "stop"),
        (
            "/v1/chat/completions",
            {"messages": [], "logit_bias": {str(token): 1 for token in range(2000)}},
            "logit_bias",
        ),
        ("/detokenize", {"tokens": [1] * 5000}, "tokens"),
    ],
)
async def test_a_list_that_is_too_long_is_refused_by_its_length(
    fake: Callable[..., FakeEngine], path: str, fields: dict[str, Any], param: str
) -> None:
    async with serving(fake()) as url, httpx.AsyncClient(base_url=url) as http:
        answer = await http.post(path, json=fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert str(len(fields[param])) in answer.text


async def test_stop_sequences_that_are_too_many_are_refused_by_their_number(
    fake: Callable[..., FakeEngine],
) -> None:
    async with serving(fake()) as url, httpx.AsyncClient(base_url=url) as http:
        answer = await http.post(
            "/v1/messages", json={"messages": [], "max_tokens": 1, "stop_sequences": ["a"] * 2000}
        )
    assert answer.status_code == 400
    assert "stop_sequences: the number of strings" in answer.text


@pytest.mark.parametrize(
    "path", [operation.path for operation in OPERATIONS if operation.request is not None]
)
async def test_a_body_of_too_many_or_too_deep_parts_is_refused_before_it_is_parsed(
    path: str, fake: Callable[..., FakeEngine]
) -> None:
    app = create_app(fake(), ServerSettings(batch_directory=None, adapter_directory="/nowhere"))
    too_many = b"[" + b"[]," * 200_000 + b"[]]"
    too_deep = b"[" * 129 + b"]" * 129
    async with serving(app) as url, httpx.AsyncClient(base_url=url) as http:
        for value, said in (
            (too_many, "more than 200000 lists, objects and keys"),
            (too_deep, "more than 128 lists and objects in one another"),
        ):
            answer = await http.post(
                path,
                content=b'{"prompt": ' + value + b"}",
                headers={"content-type": "application/json"},
            )
            assert answer.status_code == 400
            assert said in answer.text
            assert "limits.max_json_" in answer.text
