"""Messages between the engine's host and front ends, over ZeroMQ: between processes, or between
threads of one (`--in-process`).

`ZmqPost` is the host's end, a `Line` a front end's.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import select
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import msgspec
import zmq

from dovetail.errors import RequestError
from dovetail_server.frames import (
    ToEngine,
    ToFrontEnd,
    decode_to_front_end,
    encode,
    message_of,
    parts_of,
)

logger = logging.getLogger("dovetail")

MAX_TAKEN = 256  # messages that the host processes between two steps
MAX_READ = 16  # frames that a front end reads before its event loop does other work
MAX_UNREAD = 1000  # frames queued for a front end; beyond that, its requests are dropped
LONGEST_WAIT_S = 1e6

Take = Callable[[ToFrontEnd], None]


class Line(Protocol):
    """A front end's end. Called by its event loop's thread."""

    def open(self, take: Take) -> None:
        """Call `take` in the running event loop with each message from the engine."""

    def send(self, message: ToEngine) -> None:
        """Send without waiting. Raises `RequestError` if the message can't be encoded."""

    def close(self) -> None: ...


def encoded(message: ToEngine) -> list[Any]:
    """Return the parts of a message. Raises `RequestError` if it can't be encoded."""
    try:
        return parts_of(message)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise RequestError(
            f"extra, extra_args and logits_processors must hold plain values, as JSON has them: "
            f"{error}"
        ) from None


def _has_input(socket: zmq.Socket[bytes]) -> bool:
    """Return True if a message can be read. The descriptor is edge-triggered, so check this before
    waiting for it."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def _ending(
    end: object,
    socket: zmq.Socket[bytes],
    own_context: zmq.Context[zmq.Socket[bytes]] | None,
    *fds: int,
) -> Callable[[], object]:
    """Return what closes an end of a line, once; it is called when the end is freed without.
    Otherwise Python's garbage collector might free the context before the socket, and wait forever
    for the socket to be closed, in whichever thread it runs."""

    def close() -> None:
        socket.close(linger=0)
        if own_context is not None:
            own_context.term()
        for fd in fds:
            os.close(fd)

    ending = weakref.finalize(end, close)
    ending.atexit = False
    return ending


class ZmqPost:
    """The host's end of all lines. Front ends are identified by unique names. One thread at a time
    uses it, except where noted."""

    def __init__(self, address: str, context: zmq.Context[zmq.Socket[bytes]] | None = None) -> None:
        """`context`: one that is shared with the lines, for addresses within a process."""
        own_context = zmq.Context() if context is None else None
        self._socket = (context or own_context).socket(zmq.ROUTER)  # type: ignore[union-attr]  # one of them is there
        # report undeliverable messages instead of dropping them
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._socket.set(zmq.SNDHWM, MAX_UNREAD)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind(address)
        self._fd: int = self._socket.getsockopt(zmq.FD)  # type: ignore[assignment]  # an int for this option
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        # not `select`, which refuses numbers of files above 1,023
        self._poll = select.poll()
        for fd in (self._fd, self._wake_read):
            self._poll.register(fd, select.POLLIN)
        self._gone: deque[bytes] = deque()
        self._end = _ending(self, self._socket, own_context, self._wake_read, self._wake_write)

    def take(self) -> list[tuple[bytes, ToEngine]]:
        """Return pending messages with their senders' names."""
        messages: list[tuple[bytes, ToEngine]] = []
        while len(messages) < MAX_TAKEN:
            try:
                sender, body = self._socket.recv(zmq.NOBLOCK), self._socket.recv()
            except zmq.Again:
                break
            parts = []
            while self._socket.getsockopt(zmq.RCVMORE):
                parts.append(self._socket.recv(copy=False).buffer)
            try:
                messages.append((sender, message_of(body, parts)))
            except msgspec.MsgspecError:
                logger.exception("invalid message from a front end")
        return messages

    def wait(self, seconds: float) -> None:
        """Wait for a message or `wake`, up to a timeout."""
        if self._gone or _has_input(self._socket):
            return
        ready = self._poll.poll(math.ceil(1000 * max(0.0, min(seconds, LONGEST_WAIT_S))))
        if self._wake_read in dict(ready):
            os.read(self._wake_read, 4096)

    def gone(self) -> list[bytes]:
        """Return the front ends that have ended since the last call."""
        names = []
        while self._gone:
            names.append(self._gone.popleft())
        return names

    def send(self, front_end: bytes, message: ToFrontEnd) -> bool:
        """Send without waiting. Returns False if the front end's queue is full, or if it is
        gone."""
        try:
            self._socket.send_multipart((front_end, encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def tell_gone(self, front_end: bytes) -> None:
        """Report that a front end has ended. Thread-safe."""
        self._gone.append(front_end)
        self.wake()

    def wake(self) -> None:
        """Interrupt `wait`. Thread-safe."""
        with suppress(BlockingIOError):  # already signalled
            os.write(self._wake_write, b".")

    def close(self) -> None:
        self._end()


class ZmqLine:
    """A line to the engine's host."""

    def __init__(
        self, address: str, name: bytes, context: zmq.Context[zmq.Socket[bytes]] | None = None
    ) -> None:
        """`name`: unique among all front ends, past ones included. `context`: see `ZmqPost`."""
        own_context = zmq.Context() if context is None else None
        self._socket = (context or own_context).socket(zmq.DEALER)  # type: ignore[union-attr]  # one of them is there
        self._socket.set(zmq.IDENTITY, name)
        self._socket.set(zmq.SNDHWM, 0)  # bounded by the front end's admission
        self._socket.set(zmq.RCVHWM, MAX_UNREAD)
        self._socket.set(zmq.LINGER, 0)
        self._socket.connect(address)
        self._fd: int = self._socket.getsockopt(zmq.FD)  # type: ignore[assignment]  # an int for this option
        self._loop: asyncio.AbstractEventLoop | None = None
        self._take: Take | None = None
        self._reading = False  # a call of `_read` is scheduled
        self._end = _ending(self, self._socket, own_context)

    def open(self, take: Take) -> None:
        self._loop = asyncio.get_running_loop()
        self._take = take
        self._loop.add_reader(self._fd, self._read)
        self._read()

    def send(self, message: ToEngine) -> None:
        body, *parts = encoded(message)
        if parts:  # large, and not copied: a thread of the context sends them
            self._socket.send_multipart((body, *parts), zmq.NOBLOCK, copy=False)
        else:
            self._socket.send(body, zmq.NOBLOCK)
        self._read_soon()  # sending may have consumed the descriptor's edge

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._fd)
        self._take = None
        self._end()

    def _read_soon(self) -> None:
        if self._loop is not None and not self._reading and _has_input(self._socket):
            self._reading = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._reading = False
        for _ in range(MAX_READ):
            if self._take is None:
                return
            try:
                body = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(decode_to_front_end(body))
        self._read_soon()
