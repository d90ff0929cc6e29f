"""The gate in front of the router, which is played by a server of raw answers.
`test_replicas_router` has the real one behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import pytest

from dovetail_cluster.gate import NOT_ROUTED, POOLED, POSTED, create_gate
from dovetail_server.settings import ServerSettings
from tests.server.serving import PATIENCE_S, serving_app

pytestmark = pytest.mark.anyio

COMPLETIONS = "/v1/completions"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-request-id: "
    b"7\r\ntransfer-encoding: chunked\r\n\r\n"
)
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}"

Play = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def gate(play: Play, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gate whose router does as `play` says."""
    async with await asyncio.start_server(play, "127.0.0.1", 0) as router:
        app = create_gate(
            ServerSettings(page=False, **settings), router.sockets[0].getsockname()[1], "inner"
        )
        async with (
            serving_app(app) as url,
            httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client,
        ):
            yield client


def telling(heads: list[bytes], answer: bytes = OK) -> Play:
    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        writer.close()

    return play


async def test_only_health_and_readiness_are_passed_on_without_a_key() -> None:
    heads: list[bytes] = []
    async with gate(telling(heads), api_keys=("mine",)) as client:
        for path in (
            *POSTED,
            "/v1/models",
            "/v1/models/m",
            "/engine_metrics",
            "/loads",
            "/",
            "/v1/models/../../loads",
            "//health",
            "/health/",
        ):
            for key in (
                {},
                {"authorization": "Bearer other"},
                {"authorization": "Bearer inner"},
                {"x-api-key": "inner"},
            ):
                for method in ("GET", "POST"):
                    assert (await client.request(method, path, headers=key)).status_code == 401
        assert not heads
        assert [(await client.get(path)).status_code for path in ("/health", "/ready")] == [
            200,
            200,
        ]
        assert [head.split()[1] for head in heads] == [b"/health", b"/readiness"]


async def test_a_client_reaches_the_apis_of_replicas_and_nothing_else_of_the_router() -> None:
    heads: list[bytes] = []
    async with gate(telling(heads), api_keys=("mine",)) as client:
        client.headers["x-api-key"] = "mine"
        for path in (
            "/engine_metrics",
            "/loads",
            "/workers",
            "/wasm",
            "/flush_cache",
            "/readiness",
            "/v1/models/",
            "/generate",
        ):
            assert {
                (await client.request(method, path, follow_redirects=True)).status_code
                for method in ("GET", "POST", "DELETE")
            } <= {
                404,
                405,
                200,
            }
        assert {head.split()[1] for head in heads} <= {b"/v1/models", b"/v1/models/"}
        heads.clear()
        assert (
            await client.post(
                f"{COMPLETIONS}?a=b",
                content=b"{}",
                headers={"connection": "x", "te": "trailers", "x-a": "1"},
            )
        ).json() == {}
        lines = heads[0].lower().split(b"\r\n")
        assert lines[0] == b"post /v1/completions?a=b http/1.1"
        assert {
            b"authorization: bearer inner",
            b"content-length: 2",
            b"connection: close",
            b"x-a: 1",
        } <= set(lines)
        assert not any(line.startswith((b"x-api-key", b"te:", b"connection: x")) for line in lines)


async def test_of_pooling_requests_the_router_forwards_some_and_others_are_named() -> None:
    heads: list[bytes] = []
    async with gate(telling(heads)) as client:
        for path in POOLED:
            assert (await client.post(path, json={})).status_code == 200
        assert [head.split()[1] for head in heads] == [
            b"/v1/embeddings",
            b"/v1/classify",
            b"/v1/classify",
        ]
        for path in NOT_ROUTED:
            refused = await client.post(path, json={})
            assert refused.status_code == 404
            assert (
                f"doesn't forward {path}: of pooling requests it forwards /v1/embeddings"
                in refused.json()["error"]["message"]
            )
        assert len(heads) == len(POOLED)


async def test_a_stream_is_passed_on_as_it_comes() -> None:
    go_on = asyncio.Event()

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + b"3\r\none\r\n")
        await go_on.wait()
        writer.write(b"3\r\ntwo\r\n0\r\n\r\n")
        writer.close()

    async with gate(play) as client, client.stream("POST", COMPLETIONS, json={}) as answer:
        assert (answer.headers["content-type"], answer.headers.get_list("x-request-id")) == (
            "text/event-stream",
            ["7"],
        )
        pieces = answer.aiter_bytes()
        assert await anext(pieces) == b"one"
        go_on.set()
        assert [piece async for piece in pieces] == [b"two"]


async def test_an_answer_that_breaks_off_is_not_told_as_whole() -> None:
    async with gate(telling([], CHUNKED + b"3\r\none\r\n")) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(COMPLETIONS, json={})


UPGRADE = b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: other\r\n\r\n"


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\ncontent-le", b"nonsense\r\n\r\n", UPGRADE]
)
async def test_a_router_that_does_not_answer_is_a_503(answer: bytes) -> None:
    async with gate(telling([], answer)) as client:
        told = await client.post(COMPLETIONS, json={})
        assert (told.status_code, told.json()["error"]["code"], told.headers["retry-after"]) == (
            503,
            "router_down",
            "1",
        )


@pytest.mark.parametrize("endless", [b"a" * (1 << 20), b"a:\r\n" * (1 << 18)])
async def test_an_answer_whose_head_does_not_end_is_a_503(endless: bytes) -> None:
    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nx: " + endless)
        with suppress(ConnectionError):
            await reader.read()  # until the gate gives up
        writer.close()

    async with gate(play) as client:
        assert (await client.post(COMPLETIONS, json={})).status_code == 503


async def test_a_client_that_goes_away_ends_its_request_to_the_router() -> None:
    ended, begun = asyncio.Event(), asyncio.Event()

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begun.set()
        await reader.read()  # until the other end closes
        ended.set()
        writer.close()

    async with gate(play) as client:
        asked = asyncio.create_task(client.post(COMPLETIONS, json={}))
        await begun.wait()
        asked.cancel()
        async with asyncio.timeout(PATIENCE_S):
            await ended.wait()


async def test_a_body_that_is_too_large_never_reaches_the_router() -> None:
    heads: list[bytes] = []
    async with gate(telling(heads), max_body_bytes=10) as client:
        assert (await client.post(COMPLETIONS, content=b"x" * 11)).status_code == 413
        assert (await client.post("/v1/messages", content=b"x" * 11)).json()["error"][
            "type"
        ] == "request_too_large"
        assert not heads
