"""Malicious clients below HTTP, with endless headers, trailers and bodies, silent or lost
connections, and pipelined requests: each harms only itself."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from dovetail_server import wire
from dovetail_server.settings import ServerSettings
from tests.server.fake_engine import FakeEngine
from tests.server.serving import PATIENCE_S, serving
from tests.support import FULL

pytestmark = pytest.mark.anyio
ASK = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: "
    b"application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
)
KEYS = ServerSettings(api_keys=("k",))
MANY = 100 * 2**20  # bytes, more than the operating system holds of a connection that nobody reads


async def connected(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def ending(reader: asyncio.StreamReader) -> bytes:
    """Return what is received until the server closes the connection."""
    got = bytearray()
    try:
        while data := await reader.read(65536):
            got += data
    except ConnectionResetError:
        pass
    return bytes(got)


def completion(**fields: object) -> bytes:
    """A request to complete a text."""
    body = json.dumps({"prompt": "ROMEO:", "max_tokens": 10_000, **fields}).encode()
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: "
        b"application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )


def reset(writer: asyncio.StreamWriter) -> None:
    """End a connection by RST."""
    writer.get_extra_info("socket").setsockopt(
        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
    )
    writer.transport.abort()


async def is_cut(url: str, begin: bytes, more: bytes) -> bool:
    """True if a connection ends on which `begin` is sent, and then `more` without end."""
    _, writer = await connected(url)
    writer.write(begin)
    try:
        for _ in range(MANY // len(more)):
            writer.write(more)
            await writer.drain()
    except ConnectionError:
        return True
    finally:
        writer.close()
    return False


@pytest.mark.parametrize(
    "begin", [b"GET / HTTP/1.1\r\nX: ", b"GET /", ASK + b"GET / HTTP/1.1\r\nX: "]
)
async def test_a_head_without_end_is_cut(fake: Callable[..., FakeEngine], begin: bytes) -> None:
    async with serving(fake()) as url:
        assert await is_cut(url, begin, b"a" * 65536)


@pytest.mark.parametrize("settings", [ServerSettings(), KEYS])
@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"0\r\n", b"a:\r\n" * 16384),
        (b"0\r\n", b"a" * 65536),
        (b"1\r\nx\r\n0\r\na:", b"a" * 65536),
        (b"1;", b"a" * 65536),
        (b"1\r\nx\r\n1;", b"a" * 65536),
    ],
)
async def test_trailers_and_chunk_sizes_without_end_are_cut(
    fake: Callable[..., FakeEngine], settings: ServerSettings, begin: bytes, more: bytes
) -> None:
    async with serving(fake(), settings) as url:
        assert await is_cut(url, CHUNKED + begin, more)


async def test_blank_lines_without_end_are_cut(fake: Callable[..., FakeEngine]) -> None:
    async with serving(fake()) as url:
        assert await is_cut(url, ASK, b"\r\n" * 32768)


@pytest.mark.slow("answers many requests")
async def test_a_body_of_many_small_chunks_is_taken(fake: Callable[..., FakeEngine]) -> None:
    async with serving(fake()) as url, httpx.AsyncClient(base_url=url) as http:

        async def pieces() -> AsyncIterator[bytes]:
            yield b'{"max_tokens": 2, "truncate_prompt_tokens": 8, "prompt": "'
            for _ in range(2 * wire.MAX_HEAD_BYTES // 6):
                yield b"a"
            yield b'"}'

        answer = await http.post(
            "/v1/completions", content=pieces(), headers={"content-type": "application/json"}
        )
        assert answer.status_code == 200


async def test_a_trailer_is_no_header(fake: Callable[..., FakeEngine]) -> None:
    body = b'{"prompt": "ROMEO:"}'
    async with serving(fake(), KEYS) as url:
        reader, writer = await connected(url)
        writer.write(
            CHUNKED
            + b"%x\r\n%b\r\n0\r\nAuthorization: Bearer k\r\nX-Api-Key: k\r\n\r\n"
            % (len(body), body)
        )
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
        writer.close()


async def test_a_head_too_large_is_reported(fake: Callable[..., FakeEngine]) -> None:
    async with serving(fake()) as url:
        reader, writer = await connected(url)
        for size in (1000, wire.MAX_HEAD_BYTES + 1):
            writer.write(b"GET / HTTP/1.1\r\nX: " if size == 1000 else b"")
            writer.write(b"a" * size)
            await writer.drain()
            await asyncio.sleep(0.05)  # so that they come in two readings
        assert (await ending(reader)).startswith(b"HTTP/1.1 431 ")
        writer.close()


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"a:\r\n" * (wire.MAX_FIELDS - 1), 200),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"a:\r\n" * wire.MAX_FIELDS, 431),
        (b"GET /health?%b HTTP/1.1\r\nHost: x\r\n" % (b"a&" * (wire.MAX_FIELDS - 1)), 200),
        (b"GET /health?%b HTTP/1.1\r\nHost: x\r\n" % (b"a&" * wire.MAX_FIELDS), 414),
        (b"GET /health?%b HTTP/1.1\r\nHost: x\r\n" % (b"a" * wire.MAX_URL_BYTES), 414),
    ],
)
async def test_heads_have_few_fields_and_a_short_url(
    fake: Callable[..., FakeEngine], head: bytes, status: int
) -> None:
    async with serving(fake()) as url:
        reader, writer = await connected(url)
        writer.write(head + b"\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 %d " % status)
        writer.close()


async def test_a_refused_head_does_not_cut_into_the_answer_before_it(
    fake: Callable[..., FakeEngine],
) -> None:
    engine = fake(paced=True)
    async with serving(engine) as url:
        reader, writer = await connected(url)
        writer.write(completion(stream=True))
        await engine.until_requests(1)
        writer.write(b"GET / HTTP/1.1\r\n" + b"a:\r\n" * (wire.MAX_FIELDS + 1) + b"\r\n")
        assert b" 431 " not in await ending(reader)
        writer.close()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nX: ", ASK + b"G"])
async def test_who_never_ends_a_head_is_cut(
    fake: Callable[..., FakeEngine], sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HEAD_S", 0.03)
    async with serving(fake()) as url:
        reader, writer = await connected(url)
        writer.write(sent)
        await ending(reader)
        writer.close()


@pytest.mark.parametrize("sent", [CHUNKED, CHUNKED + b"1\r\nx\r\n", CHUNKED + b"0\r\na:"])
async def test_who_never_ends_an_answered_request_is_cut(
    fake: Callable[..., FakeEngine], sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HEAD_S", 0.03)
    async with serving(fake(), KEYS, timeout_keep_alive=3600) as url:
        reader, writer = await connected(url)
        writer.write(sent)
        assert (await ending(reader)).startswith(b"HTTP/1.1 401 ")
        writer.close()


async def test_blank_lines_keep_no_connection_open(
    fake: Callable[..., FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HEAD_S", 0.03)
    async with serving(fake(), KEYS, timeout_keep_alive=3600) as url:
        reader, writer = await connected(url)
        writer.write(ASK)
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
        writer.write(b"\r\n")
        await ending(reader)
        writer.close()


@pytest.mark.parametrize("lose", [asyncio.StreamWriter.close, reset])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "ahead", [b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", completion(), completion() * 3 + b"POST"]
)
async def test_all_requests_of_a_lost_connection_are_aborted(
    fake: Callable[..., FakeEngine],
    lose: Callable[[asyncio.StreamWriter], None],
    stream: bool,
    ahead: bytes,
) -> None:
    engine = fake(*["x"] * 100, paced=True)
    async with serving(engine) as url:
        _, writer = await connected(url)
        writer.write(completion(stream=stream) + ahead)
        await engine.until_requests(1)
        engine.step()
        lose(writer)
        await engine.until_aborted(1)
    assert len(engine.submitted) == 1


async def test_requests_sent_ahead_are_answered_in_order(fake: Callable[..., FakeEngine]) -> None:
    async with serving(fake()) as url:
        reader, writer = await connected(url)
        names = [str(place).encode() for place in range(wire.MAX_AHEAD)]
        for name in names:
            writer.write(ASK.replace(b"\r\n\r\n", b"\r\nx-request-id: id-%b-\r\n\r\n" % name))
        for name in names:
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"id-%b-" % name in head
            [length] = [
                int(line.split(b":")[1])
                for line in head.split(b"\r\n")
                if line.lower().startswith(b"content-length")
            ]
            await reader.readexactly(length)
        writer.close()


async def test_too_many_requests_sent_ahead_end_their_connection(
    fake: Callable[..., FakeEngine],
) -> None:
    async with serving(fake()) as url, httpx.AsyncClient(base_url=url) as http:
        reader, writer = await connected(url)
        writer.write(ASK * 10_000)
        assert (await ending(reader)).count(b"200 OK") < 10_000
        writer.close()
        assert (await http.get("/health")).status_code == 200


async def test_bodies_too_large_sent_ahead_end_their_connection(
    fake: Callable[..., FakeEngine],
) -> None:
    async with serving(fake(paced=True)) as url:
        assert await is_cut(
            url,
            completion() + b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % MANY,
            b"a" * 65536,
        )


async def test_idle_connections_do_not_block_others(fake: Callable[..., FakeEngine]) -> None:
    async with serving(fake()) as url, httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
        idle = await asyncio.gather(*(connected(url) for _ in range(4_000 if FULL else 200)))
        answer = await http.post("/v1/completions", json={"prompt": "ROMEO:", "max_tokens": 2})
        assert answer.status_code == 200
        for _, writer in idle:
            writer.close()
