"""Images by URL: only from hosts that are listed, and never from an address that isn't public."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dovetail.config.limits import Limits
from dovetail.errors import RequestError
from dovetail.front.media.fetching import Fetcher, is_public
from dovetail.front.media.sources import ImageSource, SourceKind
from tests.http_server import running

PUBLIC = "93.184.216.34"
PRIVATE = [
    "0.0.0.0",
    "10.0.0.1",
    "100.64.0.1",
    "127.0.0.1",
    "127.255.255.254",
    "169.254.169.254",
    "172.16.0.1",
    "192.0.0.1",
    "192.168.1.1",
    "198.18.0.1",
    "203.0.113.1",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::127.0.0.1",
    "::ffff:127.0.0.1",
    "::ffff:93.184.216.34",
    "64:ff9b::7f00:1",
    "64:ff9b:1::a9fe:a9fe",
    "2001:0:7f00:1::",
    "2001:db8::1",
    "2002:7f00:1::",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fe80::1%eth0",
    "fec0::1",
    "ff02::1",
    "not an address",
]
SPELLINGS = [  # of hosts that nobody listed
    "http://127.0.0.1/",
    "http://127.1/",
    "http://2130706433/",
    "http://0x7f000001/",
    "http://0177.0.0.1/",
    "http://0x7f.1/",
    "http://017700000001/",
    "http://127.0.0.1./",
    "http://localhost/",
    "http://LOCALHOST./",
    "http://[::1]/",
    "http://[::]/",
    "http://[::ffff:127.0.0.1]/",
    "http://[0:0:0:0:0:ffff:7f00:1]/",
    "http://[fe80::1%25eth0]/",
    "http://169.254.169.254/latest/meta-data/",
    "http://metadata.google.internal/computeMetadata/v1/",
    "http://pictures.example@127.0.0.1/",
    "http://127.0.0.1#@pictures.example/",
    "http://127.0.0.1\\@pictures.example/",
    "http://pictures.example\\@127.0.0.1/",
    "http://pictures.example:80@127.0.0.1/",
    "http://pictures.example.127.0.0.1.nip.example/",
    "http://pictures.example%2f@127.0.0.1/",
    "http://pictures.example\r\nHost: localhost/",
    "http://pictures.example\t/",
    "http://pictures.example :80/",
    "http://pictures.example:22/",
    "http://pictures.example:99999/",
    "http://pictures.example./",
    "http://pictures\uff0eexample/",
    "http://\u24df\u24d8ctures.example/",
    "http:///pictures.example/",
    "http:/pictures.example/",
    "http://",
    "file:///etc/passwd",
    "ftp://pictures.example/a.png",
    "gopher://pictures.example/_",
    "http://pictures.example/" + "a" * 9000,
]


class Network:
    """Names, addresses, and a server behind the public one."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.names: dict[str, list[str]] = {"pictures.example": [PUBLIC]}
        self.looked_up: list[str] = []
        self.connected: list[str] = []
        self.tls: ssl.SSLContext | None = None

    def resolve(self, host: str, port: int) -> list[str]:
        self.looked_up.append(host)
        return self.names.get(host, [])

    def connect(self, address: str, port: int, timeout_s: float) -> socket.socket:
        self.connected.append(address)
        return socket.create_connection(("127.0.0.1", self.port), timeout_s)

    def fetch(self, url: str, **limits: Any) -> bytes:
        hosts = ["pictures.example", "inside.example", "Other.example:8080"]
        fetcher = Fetcher(hosts, Limits(**limits), self.resolve, self.connect, self.tls)
        return fetcher.fetch(ImageSource(SourceKind.URL, url, "image 0"))


@contextmanager
def serving(
    answer: Callable[[BaseHTTPRequestHandler], None], tls: ssl.SSLContext | None = None
) -> Iterator[Network]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    with running(server):
        yield Network(server.server_address[1])


def sending(status: int, body: bytes = b"", **headers: str) -> Callable[[Any], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_that_are_not_public_are_known(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", [PUBLIC, "1.1.1.1", "2606:2800:220:1:248:1893:25c8:1946"])
def test_public_addresses_are_known(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize("url", SPELLINGS)
def test_hosts_that_are_not_listed_are_not_even_looked_up(url: str) -> None:
    network = Network(0)
    with pytest.raises(RequestError, match=r"^image 0"):
        network.fetch(url)
    assert not network.looked_up
    assert not network.connected


@pytest.mark.parametrize("address", PRIVATE)
def test_a_listed_name_with_an_address_that_is_not_public_is_refused(address: str) -> None:
    network = Network(0)
    for addresses in ([address], [PUBLIC, address]):
        network.names["inside.example"] = addresses
        with pytest.raises(RequestError, match="an address that isn't public"):
            network.fetch("http://inside.example/a.png")
    assert not network.connected


def test_the_connection_goes_to_the_address_that_was_checked() -> None:
    with serving(sending(200, b"picture")) as network:
        assert network.fetch("http://pictures.example/a.png?b=c") == b"picture"
        assert network.fetch("http://PICTURES.example:80") == b"picture"
    assert network.looked_up == ["pictures.example"] * 2
    assert network.connected == [PUBLIC] * 2


def test_a_host_may_be_listed_with_a_port() -> None:
    with serving(sending(200, b"picture")) as network:
        network.names["other.example"] = [PUBLIC]
        assert network.fetch("http://other.example:8080/") == b"picture"
        with pytest.raises(RequestError, match=r"'other\.example': .*media\.hosts"):
            network.fetch("http://other.example/")


def test_nothing_is_fetched_unless_hosts_are_listed() -> None:
    with pytest.raises(RequestError, match=r"or have the host added to media\.hosts"):
        Fetcher((), Limits()).fetch(ImageSource(SourceKind.URL, "https://example.com/a.png"))


@pytest.mark.parametrize(
    "target",
    [
        "http://127.0.0.1/",
        "http://169.254.169.254/latest/meta-data/",
        "//localhost/",
        "http://inside.example/",
        "file:///etc/passwd",
        "http://[::ffff:7f00:1]/",
    ],
)
def test_targets_of_redirects_are_checked(target: str) -> None:
    with serving(sending(302, Location=target)) as network:
        network.names["inside.example"] = ["127.0.0.1"]
        with pytest.raises(RequestError, match=r"^image 0"):
            network.fetch("http://pictures.example/a.png")
    assert network.connected == [PUBLIC]


def test_a_name_that_changes_its_address_is_checked_each_time() -> None:
    with serving(sending(307, Location="/again")) as network:
        addresses = iter([[PUBLIC], ["127.0.0.1"]])
        network.resolve = lambda host, port: next(addresses)  # type: ignore[method-assign]
        with pytest.raises(RequestError, match="an address that isn't public"):
            network.fetch("http://pictures.example/a.png")
    assert network.connected == [PUBLIC]


def test_redirects_end() -> None:
    with (
        serving(sending(308, Location="/again")) as network,
        pytest.raises(RequestError, match="redirected more than 3 times"),
    ):
        network.fetch("http://pictures.example/a.png")
    assert len(network.connected) == 4


def test_an_answer_that_is_too_large_is_not_read() -> None:
    sent = []

    def endless(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            while True:
                handler.wfile.write(bytes(2**16))
                sent.append(2**16)
        except OSError:
            pass

    with serving(endless) as network, pytest.raises(RequestError, match="at most 1,000 bytes"):
        network.fetch("http://pictures.example/", max_image_bytes=1000)
    assert sum(sent) < 2**25
    told = sending(200, b"", Content_Length="1001")
    with serving(told) as network, pytest.raises(RequestError, match="at most 1,000 bytes"):
        network.fetch("http://pictures.example/", max_image_bytes=1000)


@pytest.mark.parametrize("part", ["head", "body"])
def test_an_answer_that_never_ends_is_cut(part: str) -> None:
    released = threading.Event()

    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n" + (b"\r\n" if part == "body" else b""))
        try:
            while not released.wait(0.02):
                handler.wfile.write(b"x")
                handler.wfile.flush()
        except OSError:
            pass

    with serving(drip) as network:
        with pytest.raises(RequestError, match=r"longer than 0\.2 s"):
            network.fetch("http://pictures.example/", max_image_s=0.2)
        released.set()


def test_a_name_that_takes_forever_to_look_up_is_given_up() -> None:
    released = threading.Event()
    network = Network(0)
    network.resolve = lambda host, port: [str(released.wait())]  # type: ignore[method-assign]
    with pytest.raises(RequestError, match=r"longer than 0\.1 s"):
        network.fetch("http://pictures.example/", max_image_s=0.1)
    released.set()


@pytest.mark.parametrize("status", [204, 304, 401, 404, 500])
def test_other_answers_are_told(status: int) -> None:
    with (
        serving(sending(status)) as network,
        pytest.raises(RequestError, match=f"pictures.example answers with {status}"),
    ):
        network.fetch("http://pictures.example/a.png")


def test_what_is_no_http_is_refused() -> None:
    def garbage(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"220 mail.example ESMTP\r\n")

    with serving(garbage) as network, pytest.raises(RequestError, match="can't be fetched"):
        network.fetch("http://pictures.example/a.png")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_a_host_is_known_by_its_certificate(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=pictures.example", "-addext", "subjectAltName=DNS:pictures.example"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(certificate, key)
    ours = ssl.create_default_context(cafile=str(certificate))
    with serving(sending(200, b"picture"), theirs) as network:
        network.tls = ours
        assert network.fetch("https://pictures.example/a.png") == b"picture"
        network.names["inside.example"] = [PUBLIC]
        with pytest.raises(RequestError, match="can't be fetched"):
            network.fetch("https://inside.example/a.png")


def test_a_certificate_that_nobody_signed_is_refused() -> None:
    with (
        serving(sending(200, b"picture")) as network,
        pytest.raises(RequestError, match="can't be fetched"),
    ):
        network.fetch("https://pictures.example/a.png")
