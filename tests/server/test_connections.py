"""Clients that mean harm below HTTP, with heads that never end, connections that say nothing, and requests sent ahead: each harms itself alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest

from dovetail_server import wire
from dovetail_server.testing import FakeEngine
from tests.server.serving import PATIENCE_S, serving
from tests.support import FULL

pytestmark = pytest.mark.anyio
ASK = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"


async def connected(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def ending(reader: asyncio.StreamReader) -> bytes:
    """What comes until the server closes the connection."""
    got = bytearray()
    try:
        while data := await reader.read(65536):
            got += data
    except ConnectionResetError:
        pass
    return bytes(got)


@pytest.mark.parametrize("begin", [b"GET / HTTP/1.1\r\nX: ", b"GET /", ASK + b"GET / HTTP/1.1\r\nX: "])
async def test_a_head_without_end_is_cut(fake: Callable[..., FakeEngine], begin: bytes) -> None:
    async with serving(fake()) as url:
        _, writer = await connected(url)
        writer.write(begin)
        sent = 0
        try:
            while sent < 100 * 2**20:
                writer.write(b"a" * 65536)
                sent += 65536
                await writer.drain()
        except ConnectionError:
            pass
        assert sent < 100 * 2**20
        writer.close()


async def test_a_head_too_large_is_told(fake: Callable[..., FakeEngine]) -> None:
    async with serving(fake()) as url:
        reader, writer = await connected(url)
        for size in (1000, wire.MAX_HEAD_BYTES + 1):
            writer.write(b"GET / HTTP/1.1\r\nX: " if size == 1000 else b"")
            writer.write(b"a" * size)
            await writer.drain()
            await asyncio.sleep(0.05)  # so that they come in two readings
        assert (await ending(reader)).startswith(b"HTTP/1.1 431 ")
        writer.close()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nX: ", ASK + b"G"])
async def test_who_never_ends_a_head_is_cut(fake: Callable[..., FakeEngine], sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HEAD_S", 0.1)
    async with serving(fake()) as url:
        reader, writer = await connected(url)
        writer.write(sent)
        await ending(reader)
        writer.close()


async def test_requests_sent_ahead_are_answered_in_order(fake: Callable[..., FakeEngine]) -> None:
    async with serving(fake()) as url:
        reader, writer = await connected(url)
        names = [str(place).encode() for place in range(wire.MAX_AHEAD)]
        for name in names:
            writer.write(ASK.replace(b"\r\n\r\n", b"\r\nx-request-id: id-%b-\r\n\r\n" % name))
        for name in names:
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"id-%b-" % name in head
            [length] = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
            await reader.readexactly(length)
        writer.close()


async def test_too_many_requests_sent_ahead_end_their_connection(fake: Callable[..., FakeEngine]) -> None:
    async with serving(fake()) as url, httpx.AsyncClient(base_url=url) as http:
        reader, writer = await connected(url)
        writer.write(ASK * 10_000)
        assert (await ending(reader)).count(b"200 OK") < 10_000
        writer.close()
        assert (await http.get("/health")).status_code == 200


async def test_connections_that_only_wait_are_in_nobodys_way(fake: Callable[..., FakeEngine]) -> None:
    async with serving(fake()) as url, httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
        idle = await asyncio.gather(*(connected(url) for _ in range(4_000 if FULL else 200)))
        answer = await http.post("/v1/completions", json={"prompt": "ROMEO:", "max_tokens": 2})
        assert answer.status_code == 200
        for _, writer in idle:
            writer.close()
