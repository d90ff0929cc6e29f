"""`EventStream`: a response of server-sent events. Listeners write to it directly from the engine's
outputs, without a task or queue per token.

`Outbox` writes all streams of a front end in bounded turns, so that a step's outputs don't delay
the next step. A write costs several times its text. While a front end keeps up, each token is
written at once; otherwise a stream's pending tokens are coalesced in one write, so that the cost
per token falls as the load rises.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from dovetail.errors import DovetailError
from dovetail_server.errors import ErrorShape, HttpError, http_error
from dovetail_server.wire import EXTENSION, DirectWriter

logger = logging.getLogger("dovetail")

STALLED_S = 5.0  # a turn overdue for longer than this counts as stalled
_WRITES_A_TURN = 32  # about 0.2 ms, during which the event loop handles nothing else
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"
PING_S = 15.0  # idle time after which a stream sends its ping, if it has one
_CHECKS = 3  # checks within that time


class Outbox:
    """FIFO of streams to flush."""

    __slots__ = ("_due", "_streams")

    def __init__(self) -> None:
        self._streams: deque[EventStream] = deque()
        # time for which the next turn is scheduled (`time.monotonic`)
        self._due: float | None = None

    def put(self, stream: EventStream) -> None:
        """Schedule a flush. An error of it ends only that stream."""
        self._streams.append(stream)
        if self._due is None:
            self._schedule()

    def check_health(self) -> None:
        """Raise `DovetailError` if streams are no longer written."""
        if self._due is not None and (late := time.monotonic() - self._due) > STALLED_S:
            raise DovetailError(f"streams haven't been written for {late:.0f} s")

    def _schedule(self) -> None:
        asyncio.get_running_loop().call_soon(self._turn)
        self._due = time.monotonic()

    def _turn(self) -> None:
        streams = self._streams
        for _ in range(min(_WRITES_A_TURN, len(streams))):
            stream = streams.popleft()
            try:
                stream.flush()
            except Exception:
                logger.exception("failed to write a stream")
                stream.break_off()
        if streams:
            self._schedule()
        else:
            self._due = None


def event(value: Any, name: str | None = None) -> bytes:
    """Encode a value as one event. `name`: the event's type."""
    data = orjson.dumps(value)
    return (
        b"data: %b\n\n" % data
        if name is None
        else b"event: %b\ndata: %b\n\n" % (name.encode(), data)
    )


class EventStream:
    """One response of server-sent events. Listeners call `write`, `end` and `fail` in the event
    loop; the request's task calls `serve`.

    The response head is sent with the first event: earlier failures are ordinary errors with their
    own status.
    """

    def __init__(
        self,
        scope: Scope,
        send: Send,
        shape: ErrorShape,
        max_backlog_bytes: int,
        outbox: Outbox,
        error_event: str | None = None,
    ) -> None:
        """`error_event`: the type of error events, if they have one."""
        self._send = send
        self._shape = shape
        self._error_event = error_event
        self._bound = max_backlog_bytes
        self._outbox = outbox
        self._extension: DirectWriter | None = (scope.get("extensions") or {}).get(EXTENSION)
        self._direct: DirectWriter | None = None  # once the head has been sent
        self._waiting: list[bytes] = []  # pending events
        self._waiting_bytes = 0
        self._news = asyncio.Event()
        self._begun = self._ended = self._finished = False
        self._error: DovetailError | None = None
        self._broken = False  # writing has failed
        self.dropped = False  # the reader was too slow
        self._silence = 0  # checks since the last event
        self._timer: asyncio.TimerHandle | None = None

    def ping(self, data: bytes) -> None:
        """From now on, write the event `data` whenever nothing was written for about `PING_S`
        seconds. Needs a timer, but no task."""
        self._timer = asyncio.get_running_loop().call_later(
            PING_S / _CHECKS, self._check_silence, data
        )

    def write(self, data: bytes) -> None:
        """Write whole events. No-op after the end."""
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
        """End the stream."""
        self._ended = True
        self.stop_pings()
        self._news.set()

    def fail(self, error: DovetailError) -> None:
        """End the stream with an error. Before the first event `serve` raises it; afterwards it is
        sent as an event."""
        if self._ended:
            return
        if self._begun or self._waiting:
            self.write(self._error_bytes(http_error(error)))
        else:
            self._error = error
        self.end()

    def flush(self) -> None:
        """Write pending events directly."""
        waiting = self._waiting
        direct = self._direct
        if direct is None or not waiting:
            return
        if direct.backlog() > self._bound:  # of earlier writes: one large event is allowed
            self._drop()
            return
        direct.write(waiting[0] if len(waiting) == 1 else b"".join(waiting))
        waiting.clear()

    def break_off(self) -> None:
        """End the stream because writing has failed."""
        self._broken = True
        self._direct = None
        self._waiting.clear()
        self.end()

    async def serve(self) -> None:
        """Send events until the end. Raises the error of `fail` if no event was written before,
        `SlowReaderError` if the reader was dropped, and `ClientGone` if writing failed."""
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
        """Send pending events, and end the response. The head must have been sent."""
        if self._finished:
            return
        self._finished = True
        await self._pass_on()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def stop_pings(self) -> None:
        """Stop the timer of pings. Required for streams that don't end by themselves."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_silence(self, ping: bytes) -> None:
        self._silence += 1
        if self._silence >= _CHECKS:
            self.write(ping)
        if not self._ended:
            self.ping(ping)

    async def _pass_on(self) -> None:
        self.flush()
        while self._waiting:
            data = b"".join(self._waiting)
            self._waiting = []
            self._waiting_bytes = 0
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    def _drop(self) -> None:
        """Drop a slow reader with an error event, so that its backlog stays bounded."""
        if self.dropped:
            return
        self.dropped = True
        data = self._error_bytes(
            HttpError(
                400,
                f"more than {self._bound} bytes (max_backlog_bytes) are unread: the reader is too "
                f"slow",
            )
        )
        if self._direct is not None:
            self._direct.drop(b"".join([*self._waiting, data]))
            self._waiting = []
            self._direct = None
        else:
            self._waiting.append(data)
        self.end()

    def _error_bytes(self, error: HttpError) -> bytes:
        body = error.body(self._shape)
        return (
            b"data: %b\n\n" % body
            if self._error_event is None
            else b"event: %b\ndata: %b\n\n" % (self._error_event.encode(), body)
        )


class ClientGone(DovetailError):
    """The client has disconnected."""


class SlowReaderError(DovetailError):
    """A slow reader was dropped, and has been notified."""


async def until_disconnected(receive: Receive) -> None:
    """Return when the client disconnects or the response has been sent. The body must have been
    read."""
    while (await receive())["type"] != "http.disconnect":
        pass
