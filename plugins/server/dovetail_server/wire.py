"""`DirectProtocol`: uvicorn's HTTP protocol, with a way to write parts of an answer without a coroutine for each, and with limits for clients that
mean harm: uvicorn has none for heads of requests and for requests sent ahead. Give it to uvicorn as `http=`."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

EXTENSION = "dovetail.stream"
MAX_HEAD_BYTES = 65_536  # of a request's line and headers, besides what comes in one reading
HEAD_S = 30.0  # for the head of a request to come, since its connection was opened or its first byte came
MAX_AHEAD = 16  # requests sent ahead of answers
_TOLD_S = 5.0  # for a slow reader to read what waits for it, before its connection is cut


class DirectWriter:
    """Writes parts of the body of one answer, once its head is sent. `streams.EventStream` finds it in the scope's extensions."""

    __slots__ = ("_cycle", "_write", "backlog")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._write = cycle.transport.write
        self.backlog = cycle.transport.get_write_buffer_size  # bytes that wait for the reader

    def write(self, data: bytes) -> None:
        """Write a part that isn't empty, at once. Does nothing when the client has gone or the answer has ended."""
        cycle = self._cycle
        if cycle.disconnected or cycle.response_complete:
            return
        self._write(b"%x\r\n%b\r\n" % (len(data), data) if cycle.chunked_encoding else data)

    def drop(self, last: bytes) -> None:
        """Write a last part, and cut the connection: at the latest a few seconds from now, if the reader reads no more."""
        self.write(last)
        cycle = self._cycle
        if cycle.chunked_encoding and not cycle.disconnected:
            self._write(b"0\r\n\r\n")
        transport = cycle.transport
        transport.close()
        cycle.disconnected = True
        cycle.message_event.set()
        cycle.flow.resume_writing()  # whoever waits for the reader waits no more
        asyncio.get_running_loop().call_later(_TOLD_S, transport.abort)


class DirectProtocol(HttpToolsProtocol):
    """Puts a `DirectWriter` into the extensions of each request's scope. With a uvicorn that doesn't call `_start_asgi_task`, streams go without."""

    _head_timer: asyncio.TimerHandle | None = None  # while a head is awaited
    _in_head = False  # its first bytes have come
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_in_head = self._in_head
        super().data_received(data)
        if was_in_head and self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.transport.write(b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        if self._head_timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._end_head()
        if len(self.pipeline) >= MAX_AHEAD:
            self.transport.abort()
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.transport.is_closing():
            super().on_message_complete()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self.transport.abort)

    def _end_head(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["method"] != "HEAD":
            extensions: dict[str, Any] = {EXTENSION: DirectWriter(cycle)}
            cycle.scope["extensions"] = extensions
        super()._start_asgi_task(cycle, app)
