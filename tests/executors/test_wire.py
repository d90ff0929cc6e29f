"""Admission of other hosts: only those with the token and the same versions are admitted, and none
can delay the others."""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from dovetail.errors import DovetailError
from dovetail_executors import connection
from dovetail_executors.connection import CONTROL, Wire
from dovetail_executors.remote_ranks import Reception, RemoteRanks
from dovetail_executors.ring import Kind
from tests.executors.hosts import HERE, THERE, free_port
from tests.executors.ranks import nothing_left, wait_until

KEY, HELLO = b"a key for the tests", {"torch": "2.13", "dovetail-llm": "1.0"}


class Bomb:
    """Leaves a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self._path,)


def framed(data: bytes) -> bytes:
    return struct.pack("!i", len(data)) + data


def remote(address: str = THERE) -> RemoteRanks:
    return RemoteRanks(address, [], threading.Condition())


@contextmanager
def reception(*hosts: RemoteRanks) -> Iterator[tuple[Reception, int]]:
    port = free_port()
    one = Reception(HERE, port, hosts, KEY, HELLO)
    try:
        yield one, port
    finally:
        for host in hosts:
            host.stop()
        one.stop()


def come(port: int, address: str = THERE) -> socket.socket:
    return socket.create_connection((HERE, port), source_address=(address, 0))


def test_what_is_sent_is_received() -> None:
    host = remote()
    with nothing_left(), reception(host) as (one, port):
        wire = Wire(come(port), KEY, HELLO, accepting=False)
        assert wire.receive() == (CONTROL, {"jobs": []})
        wire.send({"loaded": [1]})
        wire.beat([3, 4])
        wait_until(
            lambda: host.has_said("loaded") and host.done() == [3, 4], "both have been heard"
        )
        host.tell(allocate=7)
        assert wire.receive() == (CONTROL, {"allocate": 7})
        host.send_words(Kind.STEP, [])
        assert wire.receive()[0] == Kind.STEP
        assert one.waits_for() == []
        wire.release()


@pytest.mark.parametrize(
    ("key", "hello", "why"),
    [
        (b"another key for tests", HELLO, "has another DOVETAIL_RANKS_TOKEN"),
        (KEY, {**HELLO, "torch": "2.12"}, r"torch 2.1\d, .* must be the same"),
    ],
    ids=["token", "versions"],
)
def test_both_sides_are_told_why_a_host_is_refused(
    key: bytes, hello: dict[str, str], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with nothing_left(), reception(remote()) as (one, port):
        with pytest.raises(DovetailError, match=why):
            Wire(come(port), key, hello, accepting=False)
        wait_until(
            lambda: one.refused() and caplog.messages, "the host is refused, and the log says so"
        )
        assert one.waits_for() == [THERE]
        assert caplog.messages == [
            f"executor.hosts: {THERE} was refused: {one.refused()[0].removeprefix(f'{THERE}: ')}"
        ]


def test_nothing_is_unpickled_of_someone_who_does_not_know_the_token(tmp_path: Path) -> None:
    bomb = struct.pack("<i", CONTROL) + pickle.dumps({"hello": Bomb(tmp_path / "burst")})
    with nothing_left(), reception(remote()) as (one, port):
        for said in (
            framed(bomb),
            framed(bomb[:200]),
            framed(b"#CHALLENGE#" + bomb[:60]),
            bomb * 4,
            b"GET / HTTP/1.1\r\n\r\n",
            b"\xff" * 300,
            b"",
        ):
            with come(port) as sock, suppress(OSError):  # it may be refused before it has said all
                sock.sendall(said + framed(b"#WELCOME#") + framed(bomb))
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1024):
                    pass
        assert one.waits_for() == [THERE]
        Wire(come(port), KEY, HELLO, accepting=False).release()
    assert not (tmp_path / "burst").exists()


def test_an_engine_that_is_none_is_refused_by_the_other_host() -> None:
    with nothing_left(), socket.create_server((HERE, 0)) as listener:
        sock = socket.create_connection(listener.getsockname())
        with listener.accept()[0] as theirs:
            theirs.sendall(framed(b"HTTP/1.1 400 Bad Request"))
            with pytest.raises(DovetailError, match="is no part of Dovetail"):
                Wire(sock, KEY, HELLO, accepting=False)


def test_a_silent_client_delays_none_and_is_disconnected_at_the_end() -> None:
    host = remote()
    with nothing_left(), reception(host) as (one, port):
        silent = [come(port) for _ in range(5)]
        slow = come(port)
        slow.sendall(b"\0\0\0")
        wire = Wire(come(port), KEY, HELLO, accepting=False)
        assert wire.receive()[0] == CONTROL
        assert one.waits_for() == []
        for sock in (*silent, slow):
            while sock.recv(1024):  # the challenge, and then the end
                pass
            sock.close()
        wire.release()


def test_who_takes_too_long_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "GREETING_S", 0.05)
    with nothing_left(), reception(remote()) as (one, port), come(port) as sock:
        while sock.recv(1024):
            pass
        wait_until(one.refused, "it is refused")


def test_a_host_is_let_in_once_and_no_other_host_is() -> None:
    first, second = remote(THERE), remote("127.0.0.3")
    with nothing_left(), reception(first, second) as (one, port):
        wire = Wire(come(port), KEY, HELLO, accepting=False)
        assert wire.receive()[0] == CONTROL
        for address in (THERE, "127.0.0.4"):
            with pytest.raises((OSError, EOFError)):
                Wire(come(port, address), KEY, HELLO, accepting=False)
        assert one.waits_for() == ["127.0.0.3"]
        wire.release()


def test_a_host_that_comes_as_its_engine_stops_is_sent_away() -> None:
    host = remote()
    with nothing_left(), reception(host) as (_, port):
        host.stop()
        wire = Wire(come(port), KEY, HELLO, accepting=False)
        with pytest.raises((OSError, EOFError)):
            wire.receive()
        wire.release()


def test_nothing_listens_any_more_once_all_have_come() -> None:
    with nothing_left(), reception(remote()) as (_, port):
        wire = Wire(come(port), KEY, HELLO, accepting=False)
        wait_until(lambda: not _listens(port), "the port is closed")
        wire.release()


def _listens(port: int) -> bool:
    try:
        come(port).close()
    except ConnectionRefusedError:
        return False
    return True


def test_a_port_that_is_taken_is_named() -> None:
    with nothing_left(), socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            DovetailError,
            match=f"executor.hosts: {HERE}, port {port} can't be listened at: Address already in "
            f"use",
        ):
            Reception(HERE, port, [], KEY, HELLO)
