"""`DirectProtocol`: uvicorn's HTTP protocol, with a way to write parts of an answer without a coroutine for each, and with limits for clients that
mean harm: uvicorn has none for heads of requests, trailers and requests sent ahead. Give it to uvicorn as `http=`."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

EXTENSION = "dovetail.stream"
MAX_HEAD_BYTES = 65_536  # of a request's line and headers, of trailers, and between bytes of a chunked body, besides what comes in one reading
HEAD_S = 30.0  # for the head of a request to come, since its connection was opened or its first byte came; for a body to end that is no longer read
MAX_AHEAD, MAX_AHEAD_BYTES = 16, 65_536  # requests sent ahead of answers, and of their bodies
_TOLD_S = 5.0  # for a slow reader to read what waits for it, before its connection is cut


class DirectWriter:
    """Writes parts of the body of one answer, once its head is sent. `streams.EventStream` finds it in the scope's extensions."""

    __slots__ = ("_cycle", "_is_closing", "_write", "backlog")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._write, self._is_closing = cycle.transport.write, cycle.transport.is_closing
        self.backlog = cycle.transport.get_write_buffer_size  # bytes that wait for the reader

    def write(self, data: bytes) -> None:
        """Write a part that isn't empty, at once. Does nothing when the client has gone or the answer has ended."""
        cycle = self._cycle
        if cycle.disconnected or cycle.response_complete or self._is_closing():
            return
        self._write(b"%x\r\n%b\r\n" % (len(data), data) if cycle.chunked_encoding else data)

    def drop(self, last: bytes) -> None:
        """Write a last part, and cut the connection: at the latest a few seconds from now, if the reader reads no more."""
        self.write(last)
        cycle = self._cycle
        if cycle.chunked_encoding and not cycle.disconnected and not self._is_closing():
            self._write(b"0\r\n\r\n")
        transport = cycle.transport
        transport.close()
        cycle.disconnected = True
        cycle.message_event.set()
        cycle.flow.resume_writing()  # whoever waits for the reader waits no more
        asyncio.get_running_loop().call_later(_TOLD_S, transport.abort)


class DirectProtocol(HttpToolsProtocol):
    """Puts a `DirectWriter` into the extensions of each request's scope. With a uvicorn that doesn't call `_start_asgi_task`, streams go without.

    Trailers are discarded. Reading is never paused for requests sent ahead: the loss of a connection is noticed only while it is read.
    """

    _timer: asyncio.TimerHandle | None = None  # while a head is awaited, or the end of a body that nobody reads
    _running: RequestResponseCycle | None = None  # the request that is being answered; `cycle` is the newest
    _in_message = False  # its first bytes have come, and its last haven't
    _in_head = False
    _overhead_bytes = 0  # read since the last byte of a body: of a head, of chunk sizes, of trailers

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.pipeline.clear()
        if (running := self._running) is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._overhead_bytes += len(data)
        super().data_received(data)
        if self._overhead_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            self.transport.close()
            self.loop.call_later(_TOLD_S, self.transport.abort)
        if self._timer is None and not self._in_message and self._is_idle():  # blank lines, which end uvicorn's own timer
            self._start_timer()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_message = self._in_head = True
        self._overhead_bytes = 0
        if self._timer is None:
            self._start_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._in_head = False
        self._overhead_bytes = 0
        if len(self.pipeline) >= MAX_AHEAD:
            self.transport.abort()
        if not self.transport.is_closing():
            super().on_headers_complete()
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._overhead_bytes = 0
        if self.pipeline and sum(len(cycle.body) for cycle, _ in self.pipeline) + len(body) > MAX_AHEAD_BYTES:
            self.transport.abort()
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._stop_timer()
        self._in_message = False
        self._overhead_bytes = 0
        if not self.transport.is_closing():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._timer is None and self._in_message and self._is_idle() and not self.transport.is_closing():
            self._start_timer()

    def _is_idle(self) -> bool:
        """Return True if all requests whose heads have come are answered."""
        return self.cycle is None or self.cycle.response_complete

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(HEAD_S, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if cycle.scope["method"] != "HEAD":
            extensions: dict[str, Any] = {EXTENSION: DirectWriter(cycle)}
            cycle.scope["extensions"] = extensions
        super()._start_asgi_task(cycle, app)
