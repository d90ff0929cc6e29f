"""`dovetail ranks HOST:PORT`: runs ranks of an engine on another host. It starts them, forwards
batches to them, and ends them when the engine ends or is lost; then it waits for the next
engine.
"""

from __future__ import annotations

import pickle
import socket
import sys
import threading
import time
from contextlib import suppress
from importlib import import_module
from queue import SimpleQueue
from typing import Annotated, Any

import typer

from dovetail.errors import ConfigError, DovetailError, describe
from dovetail_executors.connection import (
    BEAT,
    BEAT_S,
    CONTROL,
    LOST_S,
    Message,
    Wire,
    token,
    versions,
)
from dovetail_executors.ranks import Ranks
from dovetail_executors.ring import Kind

RETRY_S = 1.0
GONE = "the engine has ended, or was lost"
READ_S = 1.0  # that the engine gets to read why its ranks failed


def ranks(
    engine: Annotated[
        str,
        typer.Argument(
            metavar="HOST:PORT",
            help="The engine's host, the first of executor.hosts, and executor.port.",
        ),
    ],
    address: Annotated[
        str, typer.Option(help="This host's address, as executor.hosts has it, if it has several.")
    ] = "",
    once: Annotated[
        bool, typer.Option(help="End with the first engine, instead of waiting for the next.")
    ] = False,
) -> None:
    """Compute ranks of an engine that runs on another host (executor `tensor`, option `hosts`)."""
    host, _, port = engine.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"{engine}: expected HOST:PORT, as in 10.0.0.1:29555")
    key = token()
    told = ""
    # torch, now: loading its libraries would delay heartbeats
    import_module("dovetail_executors.rank")
    while True:
        try:
            wire = _connect(host.strip("[]"), int(port), address, key)
        except (OSError, EOFError) as error:
            why = (
                str(error)
                or f"it closed the connection; is {address or 'this host'} one of executor.hosts, "
                f"and the only one there?"
            )
            if why != told:
                told = why
                _say(f"waiting for an engine at {engine} ({why})")
            time.sleep(RETRY_S)
            continue
        told = ""
        _say(_Engagement(wire).run())
        if once:
            return


def _connect(host: str, port: int, address: str, key: bytes) -> Wire:
    sock = socket.create_connection(
        (host, port), timeout=LOST_S, source_address=(address, 0) if address else None
    )
    return Wire(sock, key, dict(versions()), accepting=False)


class _Engagement:
    """Serves one engine."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._last_beat = time.monotonic()
        self._over = threading.Event()
        self._received: SimpleQueue[tuple[int, Any] | None] = SimpleQueue()
        self._host: Ranks | None = None
        self._failure = ""
        self._listener = threading.Thread(target=self._listen, name="dovetail-engine", daemon=True)
        self._threads = [
            self._listener,
            threading.Thread(target=self._beat, name="dovetail-engine-beats", daemon=True),
        ]

    def run(self) -> str:
        """Serve the engine until it is gone. Returns the reason."""
        for thread in self._threads:
            thread.start()
        try:
            while (received := self._received.get()) is not None:
                self._take(*received)
        except DovetailError as error:  # of a rank; the engine has it already
            return str(error)
        except Exception as error:  # a plugin that isn't here, or too few files or processes
            self._tell_failure(describe(error))
        finally:
            self._end()
        return self._failure or GONE

    def _take(self, kind: int, data: Any) -> None:
        """Obey a message, or pass a step on to the ranks."""
        if kind == CONTROL:
            self._obey(data)
        elif self._host is not None and self._host.writer is not None:
            self._host.writer.send(Kind(kind), [data])

    def _end(self) -> None:
        if self._failure:
            self._listener.join(READ_S)
        self._over.set()
        self._wire.close()
        if self._host is not None:
            self._host.stop()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _listen(self) -> None:
        """Receive messages, also while another thread is busy."""
        try:
            while True:
                kind, data = self._wire.receive()
                self._last_beat = time.monotonic()
                if kind != BEAT:
                    self._received.put((kind, data))
        except (EOFError, OSError):
            self._received.put(None)
            if self._host is not None:
                # also if they hang and a batch waits for room in the ring
                self._host.break_off(DovetailError(GONE))
        finally:
            self._wire.release()

    def _obey(self, message: Message) -> None:
        if "jobs" in message:
            jobs = [pickle.loads(pickle.loads(job)["job"]) for job in message["jobs"]]
            host = self._host = Ranks(jobs)
            host.on_failure = self._ranks_failed
            host.start()
            _say(f"computing {', '.join(job.name for job in jobs)}")
            report = threading.Thread(
                target=self._report, args=(host,), name="dovetail-report", daemon=True
            )
            self._threads.append(report)
            report.start()
        elif self._host is not None:
            self._host.tell(**message)

    def _report(self, host: Ranks) -> None:
        """Send the engine what all ranks have sent."""
        with suppress(DovetailError, OSError, KeyError):  # KeyError: they were stopped first
            for what in ("joining", "loaded", "allocated"):
                self._wire.send({what: host.heard(what)})

    def _ranks_failed(self) -> None:
        assert self._host is not None
        self._tell_failure(str(self._host.failure).removeprefix("executor tensor: "))
        self._received.put(None)

    def _tell_failure(self, why: str) -> None:
        self._failure = why
        with suppress(OSError):  # the engine is gone
            self._wire.send({"failed": why})

    def _beat(self) -> None:
        """Exchange heartbeats with the engine's host."""
        while not self._over.wait(BEAT_S):
            writer = None if self._host is None else self._host.writer
            with suppress(OSError):
                self._wire.beat([] if writer is None else writer.done())
            if time.monotonic() - self._last_beat > LOST_S:
                self._wire.close()
                return


def _say(text: str) -> None:
    print(f"dovetail ranks: {text}", file=sys.stderr, flush=True)
