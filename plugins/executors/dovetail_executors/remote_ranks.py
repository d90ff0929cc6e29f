"""`RemoteRanks`: the ranks of another host. `dovetail ranks`
(`agent`) runs there, connects here (`Reception`), and receives its ranks' jobs.

A host whose connection ends, or that sends no heartbeat for `LOST_S`, is lost, and with it the
engine.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from dovetail.errors import DovetailError
from dovetail_executors.connection import BEAT, BEAT_S, CONTROL, LOST_S, Message, Wire, peer
from dovetail_executors.rank_process import RankJob
from dovetail_executors.ring import Kind, Words

ACCEPT_S = 0.2
PATIENCE_S = 5.0  # then the missing hosts are logged


class RemoteRanks:
    """The ranks of one other host: what `Ranks` is for this one."""

    def __init__(self, address: str, jobs: list[RankJob], changed: threading.Condition) -> None:
        """`changed` is notified of every message."""
        self.address = address
        self._jobs = jobs
        self._wire: Wire | None = None
        self._heard: dict[str, Any] = {}
        self._changed = changed
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # over `_wire`, `_thread` and `_over`
        self._last_beat = 0.0
        self._over = False
        self._done = [0] * len(jobs)
        self.failure: DovetailError | None = None
        self.on_failure: Callable[[], None] = lambda: None  # called once, by any thread

    @property
    def named(self) -> str:
        return ", ".join(job.name for job in self._jobs)

    def adopt(self, wire: Wire) -> None:
        """Send the connected host its ranks' jobs, and listen to it. Takes ownership of the
        wire."""
        with self._lock:
            if self._over:
                wire.release()
                return
            self._wire, self._last_beat = wire, time.monotonic()
            self._thread = threading.Thread(
                target=self._listen, args=(wire,), name=f"dovetail-host-{self.address}", daemon=True
            )
            self._thread.start()
        with suppress(OSError):
            wire.send({"jobs": [job.pickled() for job in self._jobs]})

    def tell(self, **message: Any) -> None:
        """As of `Ranks`."""
        with suppress(OSError):
            if self._wire is not None:
                self._wire.send(message)

    def send_words(self, kind: Kind, arrays: Sequence[Words]) -> None:
        """Send a batch, or masks, to all ranks of the host; `failure` reports a lost one."""
        with suppress(OSError):
            if self._wire is not None:
                self._wire.send_words(kind, arrays)

    def has_said(self, what: str) -> bool:
        return what in self._heard

    def said(self, what: str) -> list[Any]:
        """Return the values that its ranks have sent, in order."""
        return list(self._heard[what])

    def done(self) -> list[int]:
        """Return the number of messages that each rank had finished at its last heartbeat."""
        return self._done

    def beat(self) -> None:
        """Send a heartbeat, and check that the host's isn't overdue."""
        if self._wire is None or self._over:
            return
        with suppress(OSError):
            self._wire.beat()
        if time.monotonic() - self._last_beat > LOST_S:
            self._fail(
                f"host {self.address} was lost: nothing was heard from it for {LOST_S:g} s "
                f"({self.named})"
            )

    def break_off(self, failure: DovetailError) -> None:
        """End its ranks because of a failure elsewhere."""
        self.failure = self.failure or failure
        self.stop()

    def stop(self) -> None:
        """End its ranks. Idempotent."""
        with self._lock:
            self._over = True
            wire = self._wire
            thread = self._thread
        if wire is not None:
            wire.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        with self._changed:
            self._changed.notify_all()

    def _listen(self, wire: Wire) -> None:
        try:
            while True:
                kind, data = wire.receive()
                self._last_beat = time.monotonic()
                if kind == BEAT:
                    self._done = data.tolist() or self._done
                elif kind == CONTROL:
                    self._hear(data)
        except (EOFError, ConnectionError):
            self._fail(f"host {self.address} was lost: its connection was closed ({self.named})")
        except OSError as error:
            self._fail(f"host {self.address} was lost: {error} ({self.named})")
        finally:
            wire.release()

    def _hear(self, message: dict[str, Any]) -> None:
        if "failed" in message:
            self._fail(f"on {self.address}: {message['failed']}")
        self._heard |= message
        with self._changed:
            self._changed.notify_all()

    def _fail(self, reason: str) -> None:
        with self._lock:
            if self._over:
                return
            self._over = True
            self.failure = DovetailError(f"executor tensor: {reason}")
        if self._wire is not None:
            self._wire.close()
        self.on_failure()


def beat_until(over: threading.Event, hosts: Sequence[RemoteRanks]) -> None:
    """Exchange heartbeats with the hosts."""
    while not over.wait(BEAT_S):
        for host in hosts:
            host.beat()


log = logging.getLogger("dovetail")


class Reception:
    """Listens in a thread, and runs each handshake in one of its own, so that none can delay the
    others."""

    def __init__(
        self, address: str, port: int, hosts: Sequence[RemoteRanks], key: bytes, hello: Message
    ) -> None:
        """`key` and `hello` are as for `Wire`. Raises `DovetailError` if the address can't be
        listened at."""
        self._waiting = {host.address: host for host in hosts}
        self._key = key
        self._hello = hello
        self._refused: dict[str, str] = {}  # rejected addresses, and why
        self._greeted: set[socket.socket] = set()  # whose handshake is under way
        self._lock = threading.Lock()  # over these three
        try:
            self._listener = socket.create_server(
                (address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET
            )
        except OSError as error:
            raise DovetailError(
                f"executor.hosts: {address}, port {port} can't be listened at: "
                f"{error.strerror or error}"
            ) from error
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
                    log.warning(
                        "executor.hosts: waiting for `dovetail ranks` on %s", ", ".join(missing)
                    )
                try:
                    sock, _ = self._listener.accept()
                except TimeoutError:
                    continue
                except OSError:  # there are too many open files, perhaps only for now
                    self._over.wait(ACCEPT_S)
                    continue
                greeter = threading.Thread(
                    target=self._greet, args=(sock,), name="dovetail-host-greeting", daemon=True
                )
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
                raise DovetailError(
                    f"it isn't one of executor.hosts, or was there already (expected: "
                    f"{', '.join(expected)})"
                )
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
