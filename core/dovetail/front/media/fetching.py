"""Images fetched by URL: from the hosts of `media.hosts` only, and never from addresses that aren't
public, whatever name they have.

A name is looked up once: the connection goes to an address that was checked. Redirects are followed
by hand, and each target is checked from the beginning.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import SplitResult, urljoin, urlsplit

from dovetail.config.limits import Limits
from dovetail.errors import RequestError, shown
from dovetail.front.media.sources import ImageSource, too_large

_MAX_URL_CHARS = 8192
_MAX_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}
_CHUNK_BYTES = 64 * 1024
_HEADERS = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "dovetail"}
# IPv6 networks that lead to an IPv4 address, which may be any: NAT64, 6to4, IPv4-compatible
_TRANSLATED = tuple(
    map(ipaddress.ip_network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "::/96"))
)

Resolve = Callable[[str, int], Collection[str]]
Connect = Callable[[str, int, float], socket.socket]


class _Target(NamedTuple):
    """Parsed URL whose host is allowed, with the host and the port to connect to."""

    url: SplitResult
    host: str
    port: int


def is_public(address: str) -> bool:
    """Tell whether an IP address is one that anybody may reach: neither private, loopback,
    link-local, multicast nor reserved, and no IPv6 address that stands for an IPv4 one."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address) and (
        ip.ipv4_mapped is not None
        or ip.is_site_local
        or any(ip in network for network in _TRANSLATED)
    ):
        return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)


def _resolve(host: str, port: int) -> Collection[str]:
    """Return the addresses of a host."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return dict.fromkeys(str(one[4][0]) for one in found)


def _connect(address: str, port: int, timeout_s: float) -> socket.socket:
    return socket.create_connection((address, port), timeout=timeout_s)


@dataclass(frozen=True)
class Fetcher:
    """Fetches images. `resolve` and `connect` are the network, for tests."""

    hosts: Collection[str]
    limits: Limits
    resolve: Resolve = _resolve
    connect: Connect = _connect
    tls: ssl.SSLContext | None = None  # None: that of the system

    def fetch(self, source: ImageSource) -> bytes:
        """Return the bytes of an image that a URL names, within `limits.max_image_bytes` and
        `limits.max_image_s`. Blocks. Raises `RequestError`."""
        deadline = time.monotonic() + self.limits.max_image_s
        url = source.content
        for _ in range(1 + _MAX_REDIRECTS):
            answer = self._answer(url, source.place, deadline)
            if isinstance(answer, bytes):
                return answer
            url = urljoin(url, answer)
        raise RequestError(f"{source.place}: it is redirected more than {_MAX_REDIRECTS} times")

    def _answer(self, url: str, place: str, deadline: float) -> bytes | str:
        """Return the file that a URL names, or the URL to which it redirects."""
        target = self._target(url, place)
        address = self._address(target, place, deadline)
        try:
            with self._open(target, address, deadline) as response:
                if response.status in _REDIRECTS and response.headers["Location"]:
                    return str(response.headers["Location"])
                if response.status != http.client.OK:
                    raise RequestError(f"{place}: {target.host} answers with {response.status}")
                return self._content(response, place, deadline)
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() >= deadline:
                raise self._late(place) from None
            raise RequestError(
                f"{place}: it can't be fetched from {target.host}: {type(error).__name__}"
            ) from None

    def _target(self, url: str, place: str) -> _Target:
        """Return where a URL leads. Raises `RequestError` unless its host is allowed."""
        if len(url) > _MAX_URL_CHARS or not url.isascii() or not url.isprintable() or " " in url:
            raise RequestError(
                f"{place}: a URL must have at most {_MAX_URL_CHARS:,} characters, of ASCII and "
                f"without spaces, got {shown(url)}"
            )
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise RequestError(f"{place}: {shown(url)} is no URL: {error}") from None
        if parts.scheme not in _PORTS or not parts.hostname or "\\" in url:
            raise RequestError(f"{place}: a URL must be https://… or http://…, got {shown(url)}")
        if "@" in parts.netloc:
            raise RequestError(f"{place}: a URL must have no user or password")
        host = parts.hostname
        named = host if port in (None, _PORTS[parts.scheme]) else f"{host}:{port}"
        if named not in {one.lower() for one in self.hosts}:
            raise RequestError(
                f"{place}: images aren't fetched from {shown(named)}: send it in the request, as a "
                f"data: URL, or have the host added to media.hosts"
            )
        return _Target(parts, host, port or _PORTS[parts.scheme])

    def _address(self, target: _Target, place: str, deadline: float) -> str:
        """Return an address of the host. Raises `RequestError` unless all are public."""
        found = self._looked_up(target, place, deadline)
        if not all(map(is_public, found)):
            raise RequestError(
                f"{place}: images aren't fetched from {shown(target.host)}: it has an address that "
                f"isn't public"
            )
        return next(iter(found))

    def _looked_up(self, target: _Target, place: str, deadline: float) -> Collection[str]:
        """Return the addresses of the host, one or more. A thread looks them up, since that can't
        be given a timeout."""
        found: list[str] = []

        def look_up() -> None:
            with suppress(OSError, UnicodeError):
                found.extend(self.resolve(target.host, target.port))

        thread = threading.Thread(target=look_up, daemon=True, name="dovetail-dns")
        thread.start()
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            raise self._late(place)
        if not found:
            raise RequestError(f"{place}: the host {shown(target.host)} isn't known")
        return found

    @contextmanager
    def _open(
        self, target: _Target, address: str, deadline: float
    ) -> Iterator[http.client.HTTPResponse]:
        """Ask for the file at an address. The connection is cut at the deadline, however slowly the
        other side sends."""
        left_s = max(0.001, deadline - time.monotonic())
        connection = http.client.HTTPConnection(target.host, target.port)
        sock = self.connect(address, target.port, left_s)
        cut = threading.Timer(left_s, lambda: _cut(sock))
        cut.daemon = True
        cut.start()
        try:
            if target.url.scheme == "https":
                context = self.tls or ssl.create_default_context()
                sock = context.wrap_socket(
                    sock, server_hostname=target.host, do_handshake_on_connect=False
                )
                sock.do_handshake()
            connection.sock = sock
            path = target.url.path or "/"
            query = f"?{target.url.query}" if target.url.query else ""
            connection.request("GET", path + query, headers=_HEADERS)
            yield connection.getresponse()
        finally:
            cut.cancel()
            connection.close()
            sock.close()

    def _content(self, response: http.client.HTTPResponse, place: str, deadline: float) -> bytes:
        most = self.limits.max_image_bytes
        if (response.length or 0) > most:
            raise too_large(place, most)
        data = bytearray()
        while chunk := response.read1(_CHUNK_BYTES):
            data += chunk
            if len(data) > most:
                raise too_large(place, most)
        if time.monotonic() >= deadline:  # it was cut, which looks like its end
            raise self._late(place)
        return bytes(data)

    def _late(self, place: str) -> RequestError:
        return RequestError(
            f"{place}: fetching it takes longer than {self.limits.max_image_s:g} s "
            f"(limits.max_image_s)"
        )


def _cut(sock: socket.socket) -> None:
    """End a connection that another thread uses."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
