"""`DirectProtocol`: uvicorn's HTTP protocol with direct writes for streams, without a coroutine per write, and with limits against malicious clients
that uvicorn lacks: on request heads, trailers and pipelining. Pass it to uvicorn as `http=`."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

EXTENSION = "dovetail.stream"
MAX_HEAD_BYTES = (
    65_536  # of request line and headers, trailers, and chunk overhead; one read may exceed it
)
HEAD_S = 30.0  # timeout of a request head since the connection was opened or its first byte, and of a body that nobody reads any more
MAX_AHEAD, MAX_AHEAD_BYTES = 16, 65_536  # pipelined requests, and their bodies
_TOLD_S = 5.0  # time for a slow reader to read its backlog before the connection is cut


class DirectWriter:
    """Writes parts of a response body once the head has been sent. `EventStream` finds it in the scope's extensions."""

    __slots__ = ("_cycle", "_is_closing", "_write", "backlog")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._write, self._is_closing = cycle.transport.write, cycle.transport.is_closing
        self.backlog = cycle.transport.get_write_buffer_size  # unread bytes

    def write(self, data: bytes) -> None:
        """Write a non-empty part at once. No-op if the client is gone or the response has ended."""
        cycle = self._cycle
        if cycle.disconnected or cycle.response_complete or self._is_closing():
            return
        self._write(b"%x\r\n%b\r\n" % (len(data), data) if cycle.chunked_encoding else data)

    def drop(self, last: bytes) -> None:
        """Write a last part, and close the connection, by force after a few seconds."""
        self.write(last)
        cycle = self._cycle
        if cycle.chunked_encoding and not cycle.disconnected and not self._is_closing():
            self._write(b"0\r\n\r\n")
        transport = cycle.transport
        transport.close()
        cycle.disconnected = True
        cycle.message_event.set()
        cycle.flow.resume_writing()  # release writers that wait for the reader
        asyncio.get_running_loop().call_later(_TOLD_S, transport.abort)


class DirectProtocol(HttpToolsProtocol):
    """Adds a `DirectWriter` to the extensions of each request's scope. Versions of uvicorn without `_start_asgi_task` stream without it.

    Trailers are discarded. Reading is never paused for pipelined requests, since a lost connection is only noticed while reading.
    """

    _timer: asyncio.TimerHandle | None = (
        None  # during a request head, or the rest of an unread body
    )
    _running: RequestResponseCycle | None = (
        None  # the request being answered; `cycle` is the newest
    )
    _in_message = False  # between its first and last byte
    _in_head = False
    _overhead_bytes = 0  # bytes read since the last byte of a body

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
            self.transport.write(
                b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            )
            self.transport.close()
            self.loop.call_later(_TOLD_S, self.transport.abort)
        if (
            self._timer is None and not self._in_message and self._is_idle()
        ):  # blank lines stop uvicorn's own timer
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
        if (
            self.pipeline
            and sum(len(cycle.body) for cycle, _ in self.pipeline) + len(body) > MAX_AHEAD_BYTES
        ):
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
        if (
            self._timer is None
            and self._in_message
            and self._is_idle()
            and not self.transport.is_closing()
        ):
            self._start_timer()

    def _is_idle(self) -> bool:
        """Return True if all received requests have been answered."""
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
