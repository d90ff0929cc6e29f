"""`Reception`: accepts the connections of the other hosts until all are there."""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from dovetail.errors import DovetailError
from dovetail_executors.connection import Message, Wire, peer
from dovetail_executors.remote_ranks import RemoteRanks

log = logging.getLogger("dovetail")

ACCEPT_S = 0.2
PATIENCE_S = 5.0  # then the missing hosts are logged


class Reception:
    """Listens in a thread, and runs each handshake in one of its own, so that none can delay the others."""

    def __init__(self, address: str, port: int, hosts: Sequence[RemoteRanks], key: bytes, hello: Message) -> None:
        """`key` and `hello` are as for `Wire`. Raises `DovetailError` if the address can't be listened at."""
        self._waiting, self._key, self._hello = {host.address: host for host in hosts}, key, hello
        self._refused: dict[str, str] = {}  # rejected addresses, and why
        self._greeted: set[socket.socket] = set()  # whose handshake is under way
        self._lock = threading.Lock()  # over these three
        try:
            self._listener = socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        except OSError as error:
            raise DovetailError(f"executor.hosts: {address}, port {port} can't be listened at: {error.strerror or error}") from error
        self._listener.settimeout(ACCEPT_S)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._receive, name="dovetail-hosts", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop listening, and abort the handshakes under way."""
        self._over.set()
        self._thread.join()

    def waits_for(self) -> list[str]:
        """Return the addresses of missing hosts."""
        with self._lock:
            return list(self._waiting)

    def refused(self) -> list[str]:
        """Return the rejected addresses with the reasons."""
        with self._lock:
            return [f"{address}: {why}" for address, why in self._refused.items()]

    def _receive(self) -> None:
        greeters: list[threading.Thread] = []
        say_at = time.monotonic() + PATIENCE_S
        with self._listener:
            while (missing := self.waits_for()) and not self._over.is_set():
                if time.monotonic() > say_at:
                    say_at = math.inf
                    log.warning("executor.hosts: waiting for `dovetail ranks` on %s", ", ".join(missing))
                try:
                    sock, _ = self._listener.accept()
                except TimeoutError:
                    continue
                except OSError:  # there are too many open files, perhaps only for now
                    self._over.wait(ACCEPT_S)
                    continue
                greeter = threading.Thread(target=self._greet, args=(sock,), name="dovetail-host-greeting", daemon=True)
                greeters = [each for each in greeters if each.is_alive()] + [greeter]
                with self._lock:
                    self._greeted.add(sock)
                greeter.start()
        with self._lock:
            for sock in self._greeted:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        for greeter in greeters:
            greeter.join()

    def _greet(self, sock: socket.socket) -> None:
        address = "?"
        try:
            address = peer(sock)
            expected = self.waits_for()
            if address not in expected:
                raise DovetailError(f"it isn't one of executor.hosts, or was there already (expected: {', '.join(expected)})")
            wire = Wire(sock, self._key, self._hello, accepting=True)
            with self._lock:
                self._greeted.discard(sock)
                host = None if self._over.is_set() else self._waiting.pop(address, None)
            if host is None:
                wire.release()
            else:
                host.adopt(wire)
        except (DovetailError, EOFError, OSError) as error:
            with self._lock:
                self._greeted.discard(sock)
            sock.close()
            self._refuse(address, str(error) or "it went away")

    def _refuse(self, address: str, why: str) -> None:
        with self._lock:
            known, self._refused[address] = self._refused.get(address), why
        if why != known and not self._over.is_set():
            log.warning("executor.hosts: %s was refused: %s", address, why)
