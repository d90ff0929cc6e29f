"""`EventStream`: an answer of server-sent events that listeners write straight from the engine's outputs, with no task and no queue for a token."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from dovetail.errors import DovetailError
from dovetail_server.errors import ErrorShape, HttpError, http_error
from dovetail_server.outbox import Outbox
from dovetail_server.wire import EXTENSION, DirectWriter

HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
DONE = b"data: [DONE]\n\n"
PING_S = 15.0  # silence after which a stream that has a ping sends it
_LOOKS = 3  # times that a stream looks within that silence whether anything was written


def event(value: Any, name: str | None = None) -> bytes:
    """Return a value as one event, with its type if that has a name."""
    data = orjson.dumps(value)
    return b"data: %b\n\n" % data if name is None else b"event: %b\ndata: %b\n\n" % (name.encode(), data)


class EventStream:
    """One answer of server-sent events. `write`, `end` and `fail` are for listeners, in the event loop; `serve` is for the request's task.

    The head of the answer waits for the first event: what fails before is an ordinary error with its own status.
    """

    def __init__(self, scope: Scope, send: Send, shape: ErrorShape, max_backlog_bytes: int, outbox: Outbox, error_event: str | None = None) -> None:
        """`error_event`: the type of the event that tells of an error, if it has one."""
        self._send, self._shape, self._error_event = send, shape, error_event
        self._bound, self._outbox = max_backlog_bytes, outbox
        self._extension: DirectWriter | None = (scope.get("extensions") or {}).get(EXTENSION)
        self._direct: DirectWriter | None = None  # once the head is sent
        self._waiting: list[bytes] = []  # to be written
        self._waiting_bytes = 0
        self._news = asyncio.Event()
        self._begun = self._ended = self._finished = False
        self._error: DovetailError | None = None
        self._broken = False  # nothing more can be written
        self.dropped = False  # because its reader was too slow
        self._silence = 0  # looks since the last event
        self._timer: asyncio.TimerHandle | None = None

    def ping(self, data: bytes) -> None:
        """Write `data`, an event, from now on whenever nothing was written for `PING_S` seconds or a little less. It takes a timer and no task."""
        self._timer = asyncio.get_running_loop().call_later(PING_S / _LOOKS, self._look, data)

    def write(self, data: bytes) -> None:
        """Write whole events. After the end it does nothing."""
        if self._ended:
            return
        self._silence = 0
        if self._direct is not None:
            if not self._waiting:
                self._outbox.put(self)
            self._waiting.append(data)
        else:
            if self._waiting_bytes > self._bound:
                self._drop()
                return
            self._waiting.append(data)
            self._waiting_bytes += len(data)
            self._news.set()

    def end(self) -> None:
        """Nothing more comes."""
        self._ended = True
        self.stop_pings()
        self._news.set()

    def fail(self, error: DovetailError) -> None:
        """Nothing more comes, and why. Before the first event `serve` raises it; afterwards it is told in an event."""
        if self._ended:
            return
        if self._begun or self._waiting:
            self.write(self._told(http_error(error)))
        else:
            self._error = error
        self.end()

    def flush(self) -> None:
        """Write what waits, the direct way."""
        waiting, direct = self._waiting, self._direct
        if direct is None or not waiting:
            return
        if direct.backlog() > self._bound:  # of what was written before: one large event is nobody's fault
            self._drop()
            return
        direct.write(waiting[0] if len(waiting) == 1 else b"".join(waiting))
        waiting.clear()

    def break_off(self) -> None:
        """Nothing more can be written."""
        self._broken, self._direct = True, None
        self._waiting.clear()
        self.end()

    async def serve(self) -> None:
        """Send what is written, until the end. Raises the error of `fail` if that came before any event, `SlowReaderError` if the reader was dropped,
        and `ClientGone` if the stream was broken off."""
        await self._news.wait()
        if self._error is not None:
            raise self._error
        self._begun = True
        await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        if self._extension is not None and not self.dropped:
            self._direct = self._extension
            self.flush()
        while not self._ended:
            self._news.clear()
            await self._pass_on()
            await self._news.wait()
        if self._broken:
            raise ClientGone
        if self.dropped:
            await self._pass_on()
            raise SlowReaderError
        await self.finish()

    async def finish(self) -> None:
        """Send what is left, and the end. The head must have been sent."""
        if self._finished:
            return
        self._finished = True
        await self._pass_on()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def stop_pings(self) -> None:
        """Write no more of them. A stream that isn't ended must be told so, or its timer goes on."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, ping: bytes) -> None:
        self._silence += 1
        if self._silence >= _LOOKS:
            self.write(ping)
        if not self._ended:
            self.ping(ping)

    async def _pass_on(self) -> None:
        self.flush()
        while self._waiting:
            data, self._waiting, self._waiting_bytes = b"".join(self._waiting), [], 0
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    def _drop(self) -> None:
        """The reader is too slow: tell it and let it go, so that what waits for it stays bounded."""
        if self.dropped:
            return
        self.dropped = True
        told = self._told(HttpError(400, f"more than {self._bound} bytes (max_backlog_bytes) wait to be read: the reader is too slow"))
        if self._direct is not None:
            self._direct.drop(b"".join([*self._waiting, told]))
            self._waiting = []
            self._direct = None
        else:
            self._waiting.append(told)
        self.end()

    def _told(self, error: HttpError) -> bytes:
        body = error.body(self._shape)
        return b"data: %b\n\n" % body if self._error_event is None else b"event: %b\ndata: %b\n\n" % (self._error_event.encode(), body)


class ClientGone(DovetailError):
    """The client went away: nobody is there to be told."""


class SlowReaderError(DovetailError):
    """The reader of a stream was dropped. It knows already."""


async def until_disconnected(receive: Receive) -> None:
    """Return when the client goes away, or the answer has been sent. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
