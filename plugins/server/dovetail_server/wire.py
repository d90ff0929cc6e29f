"""`DirectProtocol`: uvicorn's HTTP protocol, with a way to write parts of an answer without a coroutine for each. Give it to uvicorn as `http=`."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

EXTENSION = "dovetail.stream"
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

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["method"] != "HEAD":
            extensions: dict[str, Any] = {EXTENSION: DirectWriter(cycle)}
            cycle.scope["extensions"] = extensions
        super()._start_asgi_task(cycle, app)
