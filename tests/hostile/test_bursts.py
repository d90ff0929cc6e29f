"""Bursts over many connections: an iteration of the event loop handles a bounded part of them, so
others are served meanwhile. Connections have no sockets here: a burst arrives at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from dovetail_server import wire
from dovetail_server.wire import DirectProtocol

pytestmark = pytest.mark.anyio

CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNK = b"1\r\na\r\n"
PARTS_A_VISIT = wire.VISIT_PARTS + wire.PARSED_BYTES // len(CHUNK) + 1
HIGH_WATER = 65_536


class Connection(asyncio.Transport):
    """A transport that keeps what is written, like a client that reads nothing."""

    def __init__(self, burst: Burst, address: str) -> None:
        super().__init__({"peername": (address, 1)})
        self.written = bytearray()
        self.is_reading = True
        self.is_cut = False
        self._protocol = DirectProtocol(burst.config, burst.state, {})
        self._protocol.connection_made(self)

    def send(self, data: bytes) -> None:
        self._protocol.data_received(data)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data
        if len(self.written) > HIGH_WATER:
            self._protocol.pause_writing()

    def get_write_buffer_size(self) -> int:
        return len(self.written)

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def is_closing(self) -> bool:
        return self.is_cut

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        if not self.is_cut:
            self.is_cut = True
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)


class Burst:
    """A server of an app that counts what it is given, and answers whole bodies."""

    def __init__(self, answer: bytes = b"") -> None:
        self.config = uvicorn.Config(self._app, interface="asgi3", log_config=None)
        self.config.load()
        self.state = ServerState()
        self.begun = 0  # requests
        self.body_bytes = 0
        self._answer = answer

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun += 1
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            self.body_bytes += len(message["body"])
            more = message["more_body"]
        length = (b"content-length", b"%d" % len(self._answer))
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": self._answer})

    def connections(self, count: int, address: str = "10.0.0.1") -> list[Connection]:
        return [Connection(self, address) for _ in range(count)]


async def iterations_until(is_done: Callable[[], bool], most: int) -> int:
    """Return how many iterations of the event loop passed; fail beyond `most`."""
    for iteration in range(most):
        if is_done():
            return iteration
        await asyncio.sleep(0)
    pytest.fail(f"not done after {most} iterations of the event loop")


async def most_an_iteration(count: Callable[[], int], total: int) -> int:
    """Return the largest increase of a count in one iteration, until it reaches `total`."""
    most = last = count()
    for _ in range(5_000):
        if last >= total:
            return most
        await asyncio.sleep(0)
        most = max(most, count() - last)
        last = count()
    pytest.fail(f"{last} of {total}")


async def test_an_iteration_parses_few_chunks_of_a_burst() -> None:
    burst, chunks = Burst(), 2_000
    for connection in burst.connections(60):
        connection.send(CHUNKED + CHUNK * chunks)
    most = await most_an_iteration(lambda: burst.body_bytes, 60 * chunks)
    assert most <= 2 * wire.VISITS * PARTS_A_VISIT  # an app may take two visits' bytes at once


async def test_an_iteration_begins_few_requests_of_a_burst() -> None:
    burst = Burst()
    for connection in burst.connections(100):
        connection.send(GET * wire.MAX_AHEAD)
    assert await most_an_iteration(lambda: burst.begun, 100 * wire.MAX_AHEAD) <= wire.VISITS


@pytest.mark.parametrize("sent", [CHUNKED + CHUNK * 10_000, GET * wire.MAX_AHEAD, b"\r\n" * 30_000])
async def test_a_request_waits_for_one_visit_of_each_connection(sent: bytes) -> None:
    burst = Burst()
    for connection in burst.connections(200):
        connection.send(sent)
    [late] = burst.connections(1)
    late.send(GET)
    await iterations_until(lambda: b" 200 OK" in late.written, 200 // wire.VISITS + 5)


@pytest.mark.parametrize("sent", [CHUNKED + CHUNK * 10_000, GET * wire.MAX_AHEAD])
async def test_a_request_does_not_wait_for_many_connections_of_another_address(
    sent: bytes,
) -> None:
    burst = Burst()
    for connection in burst.connections(200):
        connection.send(sent)
    [late] = burst.connections(1, "10.0.0.2")
    late.send(GET)
    await iterations_until(lambda: b" 200 OK" in late.written, 5)


async def test_heads_of_many_headers_are_refused_and_begin_no_request() -> None:
    burst = Burst()
    connections = burst.connections(60)
    for connection in connections:
        connection.send(b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 15_000 + b"\r\n")
    await iterations_until(lambda: all(one.is_cut for one in connections), 60 // wire.VISITS + 1)
    assert all(one.written.startswith(b"HTTP/1.1 431 ") for one in connections)
    assert burst.begun == 0


async def test_received_bytes_wait_unread_until_earlier_ones_are_parsed() -> None:
    """A connection holds what was read at once, and no more."""
    burst = Burst()
    [connection] = burst.connections(1)
    connection.send(CHUNKED + CHUNK * 10_000)
    assert not connection.is_reading
    await most_an_iteration(lambda: burst.body_bytes, 10_000)
    assert connection.is_reading


async def test_a_large_body_of_a_lone_client_is_parsed_at_once() -> None:
    burst, parts = Burst(), 256
    [connection] = burst.connections(1)
    connection.send(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (parts << 16))
    for part in range(1, parts + 1):
        connection.send(b"a" * (1 << 16))
        await iterations_until(lambda part=part: burst.body_bytes == part << 16, 3)  # type: ignore[misc]
    await iterations_until(lambda: b" 200 OK" in connection.written, 3)


async def test_answers_for_slow_readers_are_bounded_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "MAX_UNREAD_BYTES", 1 << 20)
    answer = b"a" * 100_000
    burst = Burst(answer)
    connections = burst.connections(50)
    for number, connection in enumerate(connections, 1):
        connection.send(GET)
        await iterations_until(lambda number=number: burst.begun == number, 5)  # type: ignore[misc]
        await asyncio.sleep(0)
        held = sum(len(one.written) for one in connections if not one.is_cut)
        assert held <= wire.MAX_UNREAD_BYTES + len(answer)
    assert connections[0].is_cut  # it has been behind longest
    assert not connections[-1].is_cut


async def test_a_slow_reader_is_not_cut_for_the_unread_answers_of_another_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "MAX_UNREAD_BYTES", 1 << 20)
    burst = Burst(b"a" * 100_000)
    [modest] = burst.connections(1, "10.0.0.2")
    greedy = burst.connections(50)
    for number, connection in enumerate([modest, *greedy], 1):
        connection.send(GET)
        await iterations_until(lambda number=number: burst.begun == number, 5)  # type: ignore[misc]
        await asyncio.sleep(0)
    assert not modest.is_cut
    assert sum(one.is_cut for one in greedy) > 30
