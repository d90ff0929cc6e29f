"""`Channel`: control channel between the supervisor and its processes: JSON lines over a socket
pair. Closing one end terminates the peer."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

BEAT_S = 0.25  # between heartbeats, in either direction

Message = dict[str, Any]


class Channel:
    """One end of the channel. Sending is thread-safe; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._received = b""
        self._sending = threading.Lock()

    def send(self, **message: Any) -> None:
        """Send a message. No-op if the peer is gone."""
        with self._sending, suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message] | None:
        """Wait for data, and return complete messages. None: the peer is gone."""
        try:
            data = self.socket.recv(65536)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            return None
        *lines, self._received = (self._received + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def first(self) -> tuple[Message, list[Message]]:
        """Wait for the first message; return it and those received with it. Raises `EOFError` if
        the peer is gone."""
        while (messages := self.receive()) is not None:
            if messages:
                return messages[0], messages[1:]
        raise EOFError("the supervisor is gone")

    def close(self) -> None:
        self.socket.close()


def channel_of_process(argument: str) -> Channel:
    """Return the channel to the supervisor, whose descriptor is `argument`. Signals are ignored
    from now on: terminals and systemd send them to all processes, and the supervisor handles
    them."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which child processes would inherit
    sock = socket.socket(fileno=int(argument))
    sock.set_inheritable(False)
    return Channel(sock)


def end_orphaned(directory: str, *sockets: str | None) -> None:
    """Kill this process and its children, since the supervisor is gone, and remove the server's
    files."""
    shutil.rmtree(directory, ignore_errors=True)
    for path in sockets:
        if path is not None:
            with suppress(OSError):
                os.unlink(path)
    os.killpg(os.getpgrp(), signal.SIGKILL)  # this process leads its group


def heed(
    channel: Channel, act: Callable[[Message], None], gone: Callable[[], None]
) -> threading.Thread:
    """Call `act` with each message, in a thread, and `gone` when the peer is gone."""

    def run() -> None:
        while (messages := channel.receive()) is not None:
            for message in messages:
                act(message)
        gone()

    thread = threading.Thread(target=run, name="dovetail-orders", daemon=True)
    thread.start()
    return thread
