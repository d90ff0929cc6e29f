"""Listening sockets. The supervisor owns them, so that a restarted front end keeps its port."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from contextlib import suppress

from dovetail.errors import ConfigError
from dovetail_server.settings import ServerSettings

BACKLOG = 2048  # pending connections


def bind(settings: ServerSettings) -> tuple[list[socket.socket], str]:
    """Return a bound socket for each front end, not yet listening, and the URL. Raises
    `ConfigError` if the address can't be bound."""
    if settings.uds is not None:
        return [_bind_unix(settings.uds)] * settings.front_ends, f"unix:{settings.uds}"
    try:
        family, _, _, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(
            f"--host: {settings.host!r} isn't an address of this machine: {error.strerror or error}"
        ) from None
    shared = settings.front_ends > 1
    try:
        if (
            shared and settings.port
        ):  # exclusively first, since another server's port could be shared, too
            _bind(family, address, shared=False).close()
        first = _bind(family, address, shared)
        port = first.getsockname()[1]
        address = (address[0], port, *address[2:])
        sockets = [first, *(_bind(family, address, shared) for _ in range(settings.front_ends - 1))]
    except OSError as error:
        raise ConfigError(
            f"{settings.host}:{settings.port}: {error.strerror}: give another --port or --host"
        ) from None
    host = f"[{settings.host}]" if family == socket.AF_INET6 else settings.host
    return sockets, f"{'http' if settings.tls_cert is None else 'https'}://{host}:{port}"


def listen(sock: socket.socket) -> None:
    """Listen. The event loop repeats this, but ignores errors. Raises `ConfigError` if another
    server that started at the same time was faster."""
    try:
        sock.listen(BACKLOG)
    except OSError as error:
        host, port = (
            sock.getsockname()[:2] if sock.family != socket.AF_UNIX else (sock.getsockname(), "")
        )
        raise ConfigError(
            f"{host}:{port}: {error.strerror}: give another --port or --host"
        ) from None


def is_on_loopback(sock: socket.socket) -> bool:
    """Return True if only programs on this machine, including browsers, can reach the socket. False
    for Unix sockets, which browsers can't reach."""
    return (
        sock.family != socket.AF_UNIX
        and ipaddress.ip_address(sock.getsockname()[0].partition("%")[0]).is_loopback
    )


def allow_open_files() -> None:
    """Raise the limit of open files, which includes connections, to its maximum."""
    if sys.platform != "win32":
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _bind(family: int, address: tuple[object, ...], shared: bool) -> socket.socket:
    # asyncio sets TCP_NODELAY if the protocol is given
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            # one queue of connections per front end
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def _bind_unix(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with suppress(FileNotFoundError):
            _remove_if_dead(path)
        sock.bind(path)
    except OSError as error:
        sock.close()
        raise ConfigError(f"--uds: {path}: {error.strerror or error}") from None
    return sock


def _remove_if_dead(path: str) -> None:
    """Remove a socket without a listener."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
