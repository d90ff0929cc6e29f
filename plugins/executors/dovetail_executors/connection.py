"""A connection between the engine's host and another one: control messages (`messages`), batches and signs of life over TCP.

Who connects must know the token that both hosts were given (an HMAC challenge either way, `multiprocessing.connection`), for what comes through is
unpickled. Nothing is encrypted: the network between the hosts is a private one.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

import numpy as np

from dovetail.errors import ConfigError, DovetailError
from dovetail_executors.messages import Message
from dovetail_executors.ring import Kind, Words

TOKEN = "DOVETAIL_RANKS_TOKEN"  # the environment variable
SHORTEST_TOKEN = 16  # characters
BEAT_S = 0.5  # between signs of life
LOST_S = 4.0  # without one, the other host counts as lost
GREETING_S = 10.0  # that the handshake and `hello` may take
CONTROL, BEAT = 0, 100  # besides `Kind`
_KIND = struct.Struct("<i")


def token() -> bytes:
    """Return the hosts' token. Raises `ConfigError` without one."""
    text = os.environ.get(TOKEN, "")
    if len(text) < SHORTEST_TOKEN:
        raise ConfigError(f"ranks on several hosts need {TOKEN}: the same {SHORTEST_TOKEN} or more characters in the environment on every host")
    return text.encode()


class Wire:
    """One end of a connection. `send*` may be called by any thread, `receive` by one, which calls `release` at the end; `close` by any, and ends what
    waits."""

    def __init__(self, sock: socket.socket, key: bytes, hello: Message, *, accepting: bool) -> None:
        """Takes the socket over. `hello` must be the same at both ends. Raises `DovetailError` if it isn't, or the other end doesn't know the token,
        `OSError` or `EOFError` if it goes away or takes longer than `GREETING_S`."""
        sock.setblocking(True)
        self._sock, self._lock, self._closed = sock, threading.Lock(), False
        self._connection = Connection(os.dup(sock.fileno()))
        late = threading.Timer(GREETING_S, self.close)
        late.daemon = True
        late.start()
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for step in (deliver_challenge, answer_challenge) if accepting else (answer_challenge, deliver_challenge):
                step(self._connection, key)
            self.send(hello)
            _, theirs = self.receive()  # what is unpickled here comes from someone who knows the token
            if theirs != hello:
                raise DovetailError(f"the other host has {_in_words(theirs)}, and this one {_in_words(hello)}: they must be the same")
        except (AuthenticationError, AssertionError, ValueError) as error:  # AssertionError: of Python 3.11, for what is no challenge
            self.release()
            raise DovetailError(f"the other host has another {TOKEN}, or is no part of Dovetail") from error
        except BaseException:
            self.release()
            raise
        finally:
            late.cancel()

    def send(self, message: Message) -> None:
        """Raises `OSError` if the connection is gone."""
        self._send(CONTROL, pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def send_words(self, kind: Kind, arrays: Sequence[Words]) -> None:
        """Send a batch, or masks. Raises as `send` does."""
        self._send(kind, b"".join(array.tobytes() for array in arrays))

    def beat(self, numbers: Sequence[int] = ()) -> None:
        """Give a sign of life, with a few numbers, unless something else is being sent. Raises as `send` does."""
        if self._lock.acquire(blocking=False):
            try:
                self._send_locked(BEAT, np.array(numbers, np.int64).tobytes())
            finally:
                self._lock.release()

    def receive(self) -> tuple[int, Any]:
        """Wait for what comes next, and return its kind and itself: of `CONTROL` a message, of `BEAT` numbers [any] int64, of a `Kind` words [any]
        int32. Raises `EOFError` or `OSError` if the connection is gone."""
        data = self._connection.recv_bytes()
        kind = _KIND.unpack_from(data)[0]
        if kind == CONTROL:
            return kind, pickle.loads(data[_KIND.size :])
        return kind, np.frombuffer(data, np.int64 if kind == BEAT else np.int32, offset=_KIND.size)

    def close(self) -> None:
        """End the connection: whoever waits in `send` or `receive` gets an error."""
        self._closed = True
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """End the connection and close its files. Not while another thread receives: it might read from a file that is given the same number."""
        self.close()
        with self._lock:
            self._connection.close()
            self._sock.close()

    def _send(self, kind: int, data: bytes) -> None:
        with self._lock:
            self._send_locked(kind, data)

    def _send_locked(self, kind: int, data: bytes) -> None:
        if self._closed:
            raise OSError("the connection was closed")
        self._connection.send_bytes(_KIND.pack(kind) + data)


def peer(sock: socket.socket) -> str:
    """Return the address of a socket's other end; one of IPv4 as such, also if the socket is one of IPv6."""
    address: str = sock.getpeername()[0]
    return address.removeprefix("::ffff:")


def _in_words(hello: Message) -> str:
    return ", ".join(f"{name} {version}" for name, version in hello.items())
