"""`Wire`: a TCP connection between the engine's host and another one, for control messages, batches
and heartbeats.

Messages are unpickled, so both ends must first prove that they know the hosts' token (mutual HMAC
challenge of `multiprocessing.connection`). Nothing is encrypted: the network between the hosts must
be private.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

import numpy as np

from dovetail.errors import ConfigError, DovetailError
from dovetail_executors.ring import Kind, Words

Message = dict[str, Any]

TOKEN = "DOVETAIL_RANKS_TOKEN"  # the environment variable
SHORTEST_TOKEN = 16  # characters
BEAT_S = 0.5  # between heartbeats
LOST_S = 4.0  # without one, the other host counts as lost
GREETING_S = 10.0  # that the handshake and `hello` may take
# besides `Kind`
CONTROL = 0
BEAT = 100
_KIND = struct.Struct("<i")


def token() -> bytes:
    """Return the hosts' token. Raises `ConfigError` without one."""
    text = os.environ.get(TOKEN, "")
    if len(text) < SHORTEST_TOKEN:
        raise ConfigError(
            f"ranks on several hosts need {TOKEN}: the same {SHORTEST_TOKEN} or more characters in "
            f"the environment on every host"
        )
    return text.encode()


class Wire:
    """One end of a connection. Any thread may call `send*` and `close`, which ends blocked calls;
    one calls `receive`, and `release` at the end."""

    def __init__(self, sock: socket.socket, key: bytes, hello: Message, *, accepting: bool) -> None:
        """Take ownership of the socket. Raises `DovetailError` if `hello` or the token differ at
        the other end, `OSError` or `EOFError` if that disconnects or takes longer than
        `GREETING_S`."""
        sock.setblocking(True)
        self._sock, self._lock, self._closed = sock, threading.Lock(), False
        self._connection = Connection(os.dup(sock.fileno()))
        late = threading.Timer(GREETING_S, self.close)
        late.daemon = True
        late.start()
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for step in (
                (deliver_challenge, answer_challenge)
                if accepting
                else (answer_challenge, deliver_challenge)
            ):
                step(self._connection, key)
            self.send(hello)
            _, theirs = self.receive()  # the other end knows the token: unpickling is safe
            if theirs != hello:
                raise DovetailError(
                    f"the other host has {_in_words(theirs)}, and this one {_in_words(hello)}: "
                    f"they must be the same"
                )
        except (
            AuthenticationError,
            AssertionError,
            ValueError,
        ) as error:  # AssertionError: of Python 3.11, for an invalid challenge
            self.release()
            raise DovetailError(
                f"the other host has another {TOKEN}, or is no part of Dovetail"
            ) from error
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
        """Send a heartbeat with a few numbers, unless something is being sent. Raises as `send`
        does."""
        if self._lock.acquire(blocking=False):
            try:
                self._send_locked(BEAT, np.array(numbers, np.int64).tobytes())
            finally:
                self._lock.release()

    def receive(self) -> tuple[int, Any]:
        """Wait for the next message and return its kind and content: of `CONTROL` a `Message`, of
        `BEAT` int64 [any], of a `Kind` int32 words [any]. Raises `EOFError` or `OSError` if the
        connection is gone."""
        data = self._connection.recv_bytes()
        kind = _KIND.unpack_from(data)[0]
        if kind == CONTROL:
            return kind, pickle.loads(data[_KIND.size :])
        return kind, np.frombuffer(data, np.int64 if kind == BEAT else np.int32, offset=_KIND.size)

    def close(self) -> None:
        """End the connection: blocked `send` and `receive` raise."""
        self._closed = True
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """End the connection and close its descriptors. Not while another thread receives: it could
        read from a reused descriptor."""
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
    """Return the address of a socket's peer; IPv4 addresses as such, also of an IPv6 socket."""
    address: str = sock.getpeername()[0]
    return address.removeprefix("::ffff:")


def versions() -> Message:
    """Return the versions that must be the same on all hosts, by name."""
    return {
        "python": ".".join(map(str, sys.version_info[:2])),
        **{name: version(name) for name in ("dovetail-llm", "torch")},
    }


def _in_words(hello: Message) -> str:
    return ", ".join(f"{name} {number}" for name, number in hello.items())
