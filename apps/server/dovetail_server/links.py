"""Messages travel between the engine's host and front ends by ZeroMQ between processes, or by calls between threads of one (`--in-process`).

A `Post` is the host's end (see `host`), a `Line` a front end's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import select
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import msgspec
import zmq

from dovetail.errors import RequestError
from dovetail_server.frames import ToEngine, ToFrontEnd, decode_to_engine, decode_to_front_end, encode

logger = logging.getLogger("dovetail")

MAX_TAKEN = 256  # messages that the host heeds between two steps
MAX_READ = 16  # frames that a front end reads before its event loop does other things
MAX_UNREAD = 1000  # frames that wait for a front end; one that lets more wait loses its requests
LONGEST_WAIT_S = 1e6

Take = Callable[[ToFrontEnd], None]


class Line(Protocol):
    """A front end's end. Its event loop's thread calls it."""

    def open(self, take: Take) -> None:
        """Have `take` called in this event loop with each message from the engine."""

    def send(self, message: ToEngine) -> None:
        """Send without waiting. Raises `RequestError` for a message that holds what can't be sent."""

    def close(self) -> None: ...


def encoded(message: ToEngine) -> bytes:
    """Raises `RequestError` for a message that holds what can't be sent."""
    try:
        return encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise RequestError(f"extra and extra_args must hold plain values, as JSON has them: {error}") from None


def _has_come(socket: zmq.Socket[bytes]) -> bool:
    """Return True if a message can be read. The descriptor tells of changes alone, so this is asked before waiting for it."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


class ZmqPost:
    """The host's end of all lines from other processes."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)  # tells what can't be sent, instead of dropping it
        self._socket.set(zmq.SNDHWM, MAX_UNREAD)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind(address)
        self._fd: int = self._socket.getsockopt(zmq.FD)  # type: ignore[assignment]  # of this option it is one
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._gone: deque[bytes] = deque()

    def take(self) -> list[tuple[bytes, ToEngine]]:
        messages: list[tuple[bytes, ToEngine]] = []
        while len(messages) < MAX_TAKEN:
            try:
                sender, body = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                messages.append((sender, decode_to_engine(body)))
            except msgspec.MsgspecError:
                logger.exception("a front end sent what no message is")
        return messages

    def wait(self, seconds: float | None) -> None:
        if self._gone or _has_come(self._socket):
            return
        ready, _, _ = select.select([self._fd, self._wake_read], [], [], None if seconds is None else min(seconds, LONGEST_WAIT_S))
        if self._wake_read in ready:
            os.read(self._wake_read, 4096)

    def gone(self) -> list[bytes]:
        names = []
        while self._gone:
            names.append(self._gone.popleft())
        return names

    def send(self, front_end: bytes, message: ToFrontEnd) -> bool:
        try:
            self._socket.send_multipart((front_end, encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError:  # it takes nothing, or isn't there
            return False
        return True

    def tell_gone(self, front_end: bytes) -> None:
        """Have the host know that a front end has ended. Any thread may call it."""
        self._gone.append(front_end)
        self.wake()

    def wake(self) -> None:
        """End the host's wait. Any thread may call it."""
        with suppress(BlockingIOError):  # then it is awake
            os.write(self._wake_write, b".")

    def close(self) -> None:
        self._context.destroy(linger=0)
        os.close(self._wake_read)
        os.close(self._wake_write)


class ZmqLine:
    """The line to an engine in another process."""

    def __init__(self, address: str, name: bytes) -> None:
        """`name` must be no other front end's, before or after."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.IDENTITY, name)
        self._socket.set(zmq.SNDHWM, 0)  # what waits here is bounded by the requests that the front end admits
        self._socket.set(zmq.RCVHWM, MAX_UNREAD)
        self._socket.set(zmq.LINGER, 0)
        self._socket.connect(address)
        self._fd: int = self._socket.getsockopt(zmq.FD)  # type: ignore[assignment]  # of this option it is one
        self._loop: asyncio.AbstractEventLoop | None = None
        self._take: Take | None = None
        self._reading = False  # a call of `_read` is to come

    def open(self, take: Take) -> None:
        self._loop, self._take = asyncio.get_running_loop(), take
        self._loop.add_reader(self._fd, self._read)
        self._read()

    def send(self, message: ToEngine) -> None:
        self._socket.send(encoded(message), zmq.NOBLOCK)
        self._read_soon()  # sending may have taken note of what came, of which the descriptor won't tell again

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._fd)
        self._take = None
        self._context.destroy(linger=0)

    def _read_soon(self) -> None:
        if self._loop is not None and not self._reading and _has_come(self._socket):
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


class ThreadPost:
    """The host's end of the line from the same process."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._news = threading.Event()
        self.deliver: Take | None = None

    def take(self) -> list[tuple[bytes, ToEngine]]:
        self._news.clear()
        messages: list[tuple[bytes, ToEngine]] = []
        with suppress(queue.Empty):
            while True:
                messages.append((b"", self._messages.get_nowait()))
        return messages

    def wait(self, seconds: float | None) -> None:
        self._news.wait(None if seconds is None else min(seconds, threading.TIMEOUT_MAX))

    def gone(self) -> Sequence[bytes]:
        return ()

    def send(self, front_end: bytes, message: ToFrontEnd) -> bool:
        if (deliver := self.deliver) is None:
            return False
        deliver(message)
        return True

    def put(self, message: ToEngine) -> None:
        """Any thread may call it."""
        self._messages.put(message)
        self._news.set()

    def wake(self) -> None:
        self._news.set()


class ThreadLine:
    """The line to an engine in another thread."""

    def __init__(self, post: ThreadPost) -> None:
        self._post = post
        self._take: Take | None = None

    def open(self, take: Take) -> None:
        self._take = take
        loop = asyncio.get_running_loop()

        def deliver(message: ToFrontEnd) -> None:
            with suppress(RuntimeError):  # the loop was closed: nobody listens
                loop.call_soon_threadsafe(self._pass_on, message)

        self._post.deliver = deliver

    def send(self, message: ToEngine) -> None:
        encoded(message)  # so that what another process couldn't be sent isn't taken here either
        self._post.put(message)

    def close(self) -> None:
        self._take = self._post.deliver = None

    def _pass_on(self, message: ToFrontEnd) -> None:
        if self._take is not None:
            self._take(message)
