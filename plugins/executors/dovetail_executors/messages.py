"""Messages between the engine's process and its ranks', over a socket pair: pickled dictionaries behind their length. For starting and ending;
batches go through the ring.
"""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any

LENGTH = struct.Struct("<Q")

Message = dict[str, Any]


def send(control: socket.socket, message: Message) -> None:
    """Raises `OSError` if the other end is closed."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    control.sendall(LENGTH.pack(len(data)) + data)


def receive(control: socket.socket) -> Message:
    """Wait for a message. Raises `EOFError` if the other end is closed."""
    message: Message = pickle.loads(_exactly(control, LENGTH.unpack(_exactly(control, LENGTH.size))[0]))
    return message


def split(data: bytes) -> tuple[list[Message], bytes]:
    """Return the messages that `data` begins with, and what is left of it."""
    messages = []
    while len(data) >= LENGTH.size:
        end = LENGTH.size + LENGTH.unpack_from(data)[0]
        if len(data) < end:
            break
        messages.append(pickle.loads(data[LENGTH.size : end]))
        data = data[end:]
    return messages, data


def _exactly(control: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = control.recv(count - len(data))
        if not part:
            raise EOFError
        data += part
    return data
