"""`DirectProtocol`: uvicorn's HTTP protocol with direct writes for streams, without a coroutine per
write, and with limits against malicious clients that uvicorn lacks: on request heads, trailers and
pipelining, on what one iteration of the event loop parses, and on unread answers. Pass it to
uvicorn as `http=`."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Any
from weakref import WeakKeyDictionary

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

logger = logging.getLogger("dovetail")

EXTENSION = "dovetail.stream"
# Of request line and headers, trailers, and chunk overhead; the bytes parsed at once may exceed it.
MAX_HEAD_BYTES = 65_536
MAX_URL_BYTES = 8_192
# Of headers, and of a URL's parameters: code that reads them takes microseconds for each.
MAX_FIELDS = 128
# timeout of a request head since the connection was opened or its first byte, and of a body that
# nobody reads any more
HEAD_S = 30.0
# pipelined requests, and their bodies
MAX_AHEAD = 16
MAX_AHEAD_BYTES = 65_536
MAX_UNREAD_BYTES = 256 * 2**20  # of answers that wait for slow readers, over all connections
_TOLD_S = 5.0  # time for a slow reader to read its backlog before the connection is cut

# Connections that may parse or start a request per iteration of the event loop: 2 ms at worst.
# An iteration accepts one connection, so a burst of new ones waits for as many iterations.
VISITS = 8
# Limits of one visit: bytes parsed, and headers plus chunks.
VISIT_BYTES = 65_536
VISIT_PARTS = 128
PARSED_BYTES = 2_048  # parsed at a time; the limits are checked in between


class Turns:
    """Lets connections parse what they received, and start requests, in turn, so that bursts over
    many connections don't hold the event loop. Addresses take turns, and the connections of each.
    While there is little to do, nothing waits."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[Hashable, deque[Callable[[], bool]]] = OrderedDict()
        self._num_waiting = 0
        self._left = VISITS  # in this iteration of the event loop
        self._is_scheduled = False

    def run(self, address: Hashable, visit: Callable[[], bool]) -> bool:
        """Call `visit` until it returns True, at most once per turn. Return False if it will be
        called again, in later iterations of the event loop."""
        self._schedule()
        if self._left:
            self._left -= 1
            if visit():
                return True
        self._wait(address, visit)
        return False

    def _wait(self, address: Hashable, visit: Callable[[], bool]) -> None:
        self._waiting.setdefault(address, deque()).append(visit)
        self._num_waiting += 1

    def _next(self) -> tuple[Hashable, Callable[[], bool]]:
        address, visits = self._waiting.popitem(last=False)
        visit = visits.popleft()
        self._num_waiting -= 1
        if visits:
            self._waiting[address] = visits
        return address, visit

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._is_scheduled = False
        visits = min(VISITS, self._num_waiting)
        try:
            for _ in range(visits):
                address, visit = self._next()
                if not visit():
                    self._wait(address, visit)
        finally:
            self._left = VISITS - visits
            if self._waiting:
                self._schedule()


class UnreadAnswers:
    """Bounds the bytes that wait for slow readers over all connections."""

    def __init__(self) -> None:
        # Unread bytes of connections whose readers are behind, in the order in which they fell
        # behind. Those read since the last note still count.
        self._sizes: dict[DirectProtocol, int] = {}
        self._total = 0

    def note(self, connection: DirectProtocol) -> None:
        """Count a slow reader's unread bytes. Beyond `MAX_UNREAD_BYTES`, close connections of the
        client with most of them, that behind longest first, until a quarter of it is free."""
        size = connection.transport.get_write_buffer_size()
        self._total += size - self._sizes.get(connection, 0)
        self._sizes[connection] = size
        if self._total > MAX_UNREAD_BYTES:
            self._shrink()

    def forget(self, connection: DirectProtocol) -> None:
        """Stop counting a connection that has caught up or is lost. Idempotent."""
        self._total -= self._sizes.pop(connection, 0)

    def _shrink(self) -> None:
        held: Counter[Hashable] = Counter()
        behind: dict[Hashable, deque[DirectProtocol]] = {}
        for connection in self._sizes:
            size = connection.transport.get_write_buffer_size()
            self._sizes[connection] = size
            held[connection.owner] += size
            behind.setdefault(connection.owner, deque()).append(connection)
        self._total = held.total()
        # A heap, as there may be thousands: numbers, since owners have no order.
        greediest = [(-size, number, owner) for number, (owner, size) in enumerate(held.items())]
        heapify(greediest)
        while self._total > MAX_UNREAD_BYTES * 3 // 4:
            size, number, owner = heappop(greediest)
            connection = behind[owner].popleft()
            if behind[owner]:
                heappush(greediest, (size + self._sizes[connection], number, owner))
            self.forget(connection)
            connection.loop.call_soon(connection.transport.abort)  # not within its own write


# What all connections of a server share.
_TURNS: WeakKeyDictionary[ServerState, Turns] = WeakKeyDictionary()
_UNREAD: WeakKeyDictionary[ServerState, UnreadAnswers] = WeakKeyDictionary()


class _Flow(FlowControl):
    """Also pauses reading while received bytes wait to be parsed."""

    _is_held = False

    def hold(self) -> None:
        if not self._is_held and not self._transport.is_closing():
            self._is_held = True
            self._transport.pause_reading()

    def release(self) -> None:
        if self._is_held:
            self._is_held = False
            if not self.read_paused and not self._transport.is_closing():
                self._transport.resume_reading()

    def resume_reading(self) -> None:
        if self._is_held:
            self.read_paused = False
        else:
            super().resume_reading()


class DirectWriter:
    """Writes parts of a response body once the head has been sent. `EventStream` finds it in the
    scope's extensions."""

    __slots__ = ("_cycle", "_is_closing", "_note", "_write", "backlog")

    def __init__(self, cycle: RequestResponseCycle, note: Callable[[], None]) -> None:
        """`note`: called after each write while the reader is behind."""
        self._cycle = cycle
        self._note = note
        self._write = cycle.transport.write
        self._is_closing = cycle.transport.is_closing
        self.backlog = cycle.transport.get_write_buffer_size  # unread bytes

    def write(self, data: bytes) -> None:
        """Write a non-empty part at once. No-op if the client is gone or the response has ended."""
        cycle = self._cycle
        if cycle.disconnected or cycle.response_complete or self._is_closing():
            return
        self._write(b"%x\r\n%b\r\n" % (len(data), data) if cycle.chunked_encoding else data)
        if cycle.flow.write_paused:
            self._note()

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
    """Adds a `DirectWriter` to the extensions of each request's scope. Versions of uvicorn without
    `_start_asgi_task` stream without it.

    Trailers are discarded. Reading is never paused for pipelined requests, since a lost connection
    is only noticed while reading.
    """

    flow: _Flow
    _received = b""  # bytes that aren't all parsed
    _parsed_bytes = 0  # of them
    _parts = 0  # headers and pieces of bodies of this visit
    _is_parsing = False
    # during a request head, or the rest of an unread body
    _timer: asyncio.TimerHandle | None = None
    # the request being answered; `cycle` is the newest
    _running: RequestResponseCycle | None = None
    _in_message = False  # between its first and last byte
    _in_head = False
    _overhead_bytes = 0  # bytes read since the last byte of a body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self.flow = _Flow(transport)
        self._turns = _TURNS.setdefault(self.server_state, Turns())
        self._unread = _UNREAD.setdefault(self.server_state, UnreadAnswers())
        self._address = self.client and self.client[0]
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._unread.forget(self)
        self._received = b""
        self.pipeline.clear()
        if (running := self._running) is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)

    @property
    def owner(self) -> Hashable:
        """The client's API key and address, by its latest request."""
        if self._running is None:
            return None, self._address
        scope = self._running.scope
        address = scope["client"] or (None,)  # as a proxy says, if it is trusted
        return scope.get("dovetail.key"), address[0]

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread.note(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread.forget(self)

    def data_received(self, data: bytes) -> None:
        if self._received:  # TLS may deliver more after a pause
            self._received += data
        else:
            self._received = data
            if not self._turns.run(self._address, self._parse_some):
                self.flow.hold()

    def _parse_some(self) -> bool:
        """Parse a bounded part of the received bytes; return False if there are more."""
        self._parts = 0
        received = memoryview(self._received)
        end = min(len(received), self._parsed_bytes + VISIT_BYTES)
        while self._parsed_bytes < end and self._parts < VISIT_PARTS:
            piece = received[self._parsed_bytes : self._parsed_bytes + PARSED_BYTES]
            self._parsed_bytes += len(piece)
            self._parse(piece)
            if self.transport.is_closing() or self._is_upgraded():
                self._parsed_bytes = len(received)
        if self._parsed_bytes < len(received):
            return False
        self._received = b""
        self._parsed_bytes = 0
        self.flow.release()
        return True

    def _parse(self, piece: memoryview) -> None:
        self._overhead_bytes += len(piece)
        self._is_parsing = True
        try:
            super().data_received(piece)  # type: ignore[arg-type]  # any buffer will do
        except Exception:
            logger.exception("failed to parse a request")
            self.transport.abort()
        self._is_parsing = False
        if self._overhead_bytes > MAX_HEAD_BYTES:
            self._refuse(b"431 Request Header Fields Too Large")
        if (
            self._timer is None and not self._in_message and self._is_idle()
        ):  # blank lines stop uvicorn's own timer
            self._start_timer()

    def _is_upgraded(self) -> bool:
        """Return True after a request for another protocol, which nothing here speaks."""
        return not self._in_message and self.parser.should_upgrade()

    def _refuse(self, status: bytes) -> None:
        """Close the connection, with an answer to this request unless another one is due."""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        is_answered = self._is_idle()
        is_next = not self._in_head and cycle is self._running
        if is_answered or (is_next and not cycle.response_started):
            self.transport.write(
                b"HTTP/1.1 %b\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % status
            )
        self.transport.close()
        self.loop.call_later(_TOLD_S, self.transport.abort)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_message = self._in_head = True
        self._overhead_bytes = 0
        if self._timer is None:
            self._start_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._parts += 1
        if not self._in_head or self.transport.is_closing():
            return
        super().on_header(name, value)
        if len(self.headers) > MAX_FIELDS:
            self._refuse(b"431 Request Header Fields Too Large")

    def on_headers_complete(self) -> None:
        if len(self.url) > MAX_URL_BYTES or self.url.count(b"&") >= MAX_FIELDS:
            self._refuse(b"414 URI Too Long")
        self._stop_timer()
        self._in_head = False
        self._overhead_bytes = 0
        if len(self.pipeline) >= MAX_AHEAD:
            self.transport.abort()
        if not self.transport.is_closing():
            super().on_headers_complete()
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._parts += 1
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
        reads_body = self._in_message and self._is_idle()
        if self._timer is None and reads_body and not self.transport.is_closing():
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
        if self._is_parsing:
            self._start(cycle, app)
        else:  # a pipelined request, whose turn begins with the end of the last answer
            self._turns.run(self._address, partial(self._start, cycle, app))

    def _start(self, cycle: RequestResponseCycle, app: Any) -> bool:
        if cycle.disconnected:
            return True
        if cycle.scope["method"] != "HEAD":
            extensions: dict[str, Any] = {
                EXTENSION: DirectWriter(cycle, lambda: self._unread.note(self))
            }
            cycle.scope["extensions"] = extensions
        super()._start_asgi_task(cycle, app)
        return True
