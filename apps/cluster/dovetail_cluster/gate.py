"""The gate: a reverse proxy in front of the router that checks API keys and forwards only requests
to the APIs of replicas.

The router itself, on loopback, answers some routes without a key, such as lists of replicas and
their metrics.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import traceback
from contextlib import suppress
from typing import NoReturn

import httptools
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from dovetail_server.admission import (
    BoundedReceive,
    HeldBody,
    HeldBytes,
    body_too_large,
    receive_body,
)
from dovetail_server.app import http_exception, middleware_of
from dovetail_server.errors import HttpError
from dovetail_server.front_end import new_event_loop
from dovetail_server.settings import ServerSettings
from dovetail_server.sockets import BACKLOG, allow_open_files, is_on_loopback
from dovetail_server.streams import ClientGone, until_disconnected
from dovetail_server.wire import DirectProtocol

POSTED = {  # the router's path; None: the same
    **dict.fromkeys(
        (
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/messages",
            "/v1/messages/count_tokens",
            "/v1/responses",
            "/v1/embeddings",
        )
    ),
    **dict.fromkeys(("/v1/classify", "/classify"), b"/v1/classify"),
}
POOLED = ("/v1/embeddings", "/v1/classify", "/classify")
# the router has none, or changes what they mean
NOT_ROUTED = (
    "/v1/score",
    "/score",
    "/v1/rerank",
    "/rerank",
    "/v2/rerank",
    "/pooling",
)
ASKED = {
    "/health": b"/health",
    "/ready": b"/readiness",
    "/v1/models": None,
    "/v1/models/{model:path}": None,
}  # the router's path; None: the same
READ_BYTES = 2**16
MAX_HEAD_BYTES = 2**18  # of a response: the parser copies a header with each piece of it
# headers that the gate sets
_OWN = frozenset({b"authorization", b"x-api-key", b"host", b"content-length", b"expect"})
_OF_CONNECTION = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)


def create_gate(
    settings: ServerSettings, port: int, key: str, *, on_loopback: bool = False
) -> Starlette:
    """Return the app. `settings`: those of the replicas, with the clients' keys. The router listens
    on loopback at `port` and requires `key`. `on_loopback`: only this machine can reach the
    gate."""
    bodies = HeldBytes(settings.max_received_bytes)
    routes = [
        Route(path, Forward(settings, bodies, port, key, b"POST", name), methods=["POST"])
        for path, name in POSTED.items()
    ]
    routes += [
        Route(path, Forward(settings, bodies, port, key, b"GET", name), methods=["GET"])
        for path, name in ASKED.items()
    ]
    routes += [Route(path, NotRouted()) for path in NOT_ROUTED]
    handlers = {HTTPException: http_exception, HttpError: http_exception}
    return Starlette(
        routes=routes, middleware=middleware_of(settings, on_loopback), exception_handlers=handlers
    )


def serve_gate(
    host: str, port: int, settings: ServerSettings, router_port: int, key: str
) -> NoReturn:
    """Serve the gate in a thread of the router's process, and end the process if it fails."""
    try:
        allow_open_files()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
        app = create_gate(settings, router_port, key, on_loopback=is_on_loopback(listening))
        config = uvicorn.Config(
            app,
            http=DirectProtocol,
            ws="none",
            loop="none",
            lifespan="off",
            access_log=False,
            log_level="warning",
            server_header=False,
            date_header=False,
        )
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(uvicorn.Server(config).serve([listening]))
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)


class NotRouted:
    """A route of replicas that the router can't forward."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise HttpError(
            404,
            f"the router doesn't forward {scope['path']}: of pooling requests it forwards "
            f"{', '.join(POOLED)}",
            code="not_routed",
        )


class Forward:
    """A route that forwards each request on a connection of its own, and streams the response
    back."""

    def __init__(
        self,
        settings: ServerSettings,
        bodies: HeldBytes,
        port: int,
        key: str,
        method: bytes,
        path: bytes | None = None,
    ) -> None:
        """`path`: the router's, if it differs."""
        self._settings, self._bodies, self._port, self._key = settings, bodies, port, key.encode()
        self._method = method
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientGone):
            await self._forward(scope, receive, send)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        held = HeldBody(self._bodies)
        most = self._settings.max_body_bytes
        timeout_s = self._settings.body_timeout_s
        bounded = BoundedReceive(
            scope, receive, most, body_too_large(most), timeout_s, held.grow_to
        )
        try:
            body = b"".join([part async for part in receive_body(bounded)])
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            except OSError:
                raise HttpError(
                    503,
                    "the router doesn't answer: try again",
                    code="router_down",
                    headers={"Retry-After": "1"},
                ) from None
            watch = asyncio.create_task(until_disconnected(receive))
            watch.add_done_callback(lambda _: writer.transport.abort())
            try:
                writer.write(self._head(scope, len(body)) + body)
                del body
                with suppress(OSError):  # the response reports it
                    await writer.drain()
                held.release()
                await self._pass_on(reader, send, watch)
            finally:
                watch.cancel()
                writer.close()
        finally:
            held.release()

    def _head(self, scope: Scope, size: int) -> bytes:
        path = self._path or scope["raw_path"]
        if scope["query_string"]:
            path += b"?" + scope["query_string"]
        lines = [
            b"%b %b HTTP/1.1" % (self._method, path),
            b"host: 127.0.0.1",
            b"connection: close",
            b"authorization: Bearer " + self._key,
        ]
        lines += [
            b"%b: %b" % (name, value)
            for name, value in scope["headers"]
            if name not in _OWN | _OF_CONNECTION
        ]
        if size:
            lines.append(b"content-length: %d" % size)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    async def _pass_on(
        self, reader: asyncio.StreamReader, send: Send, watch: asyncio.Task[None]
    ) -> None:
        """Stream the response. If the router dies midway it stays incomplete, which closes the
        client's connection."""
        answer = _Answer()
        parser = httptools.HttpResponseParser(answer)
        is_begun = False
        head_bytes = 0
        while not answer.is_whole:
            try:
                data = await reader.read(READ_BYTES)
                parser.feed_data(data)
            except (OSError, httptools.HttpParserError, httptools.HttpParserUpgrade):
                data = b""
            if not answer.has_head:
                head_bytes += len(data)
                if head_bytes > MAX_HEAD_BYTES:
                    data = b""
            if watch.done():
                return
            if not data:
                if is_begun:
                    return
                raise HttpError(
                    503,
                    "the router ended before it answered: try again",
                    code="router_down",
                    headers={"Retry-After": "1"},
                )
            if answer.has_head and not is_begun:
                is_begun = True
                await send(
                    {
                        "type": "http.response.start",
                        "status": parser.get_status_code(),
                        "headers": answer.headers,
                    }
                )
            if is_begun and (answer.parts or answer.is_whole):
                parts = answer.parts
                answer.parts = []
                await send(
                    {
                        "type": "http.response.body",
                        "body": b"".join(parts),
                        "more_body": not answer.is_whole,
                    }
                )


class _Answer:
    """Callbacks of the parser for the router's response."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.parts: list[bytes] = []  # of the body, not yet sent
        self.has_head = self.is_whole = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if (name := name.lower()) not in _OF_CONNECTION:
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.has_head = True

    def on_body(self, data: bytes) -> None:
        self.parts.append(data)

    def on_message_complete(self) -> None:
        self.is_whole = True
