"""`Channel`: what the supervisor and its processes tell each other, a JSON object a line over a socket pair. Its end is the other's end."""

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
    """One end. Several threads may send, one receives."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._received = b""
        self._sending = threading.Lock()

    def send(self, **message: Any) -> None:
        """Send a message; if the other end is gone, nothing happens."""
        with self._sending, suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message] | None:
        """Return the messages that have come, after waiting for some data. None: the other end is gone."""
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
        """Return the first message, once it has come, and those that came with it. Raises `EOFError` if the other end is gone."""
        while (messages := self.receive()) is not None:
            if messages:
                return messages[0], messages[1:]
        raise EOFError("the supervisor is gone")

    def close(self) -> None:
        self.socket.close()


def channel_of_process(argument: str) -> Channel:
    """Return the channel to the supervisor, in a process that it started with the number of a descriptor as `argument`. Signals are the supervisor's
    business from now on: a terminal or systemd sends them to all processes at once."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the processes that it starts would inherit
    sock = socket.socket(fileno=int(argument))
    sock.set_inheritable(False)
    return Channel(sock)


def end_orphaned(directory: str, *sockets: str | None) -> None:
    """End this process at once, and all that it started, since the supervisor is gone; of its files nothing stays behind."""
    shutil.rmtree(directory, ignore_errors=True)
    for path in sockets:
        if path is not None:
            with suppress(OSError):
                os.unlink(path)
    os.killpg(os.getpgrp(), signal.SIGKILL)  # the supervisor made it the leader of a group


def heed(channel: Channel, act: Callable[[Message], None], gone: Callable[[], None]) -> threading.Thread:
    """Call `act` with each message, in a thread, and `gone` at the end."""

    def run() -> None:
        while (messages := channel.receive()) is not None:
            for message in messages:
                act(message)
        gone()

    thread = threading.Thread(target=run, name="dovetail-orders", daemon=True)
    thread.start()
    return thread
