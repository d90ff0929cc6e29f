"""Bare ASGI middleware: a request id and a log line for each request, API keys, and what keeps other sites' pages out where there are none."""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import re
import time
import uuid
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dovetail_server import live_page
from dovetail_server.errors import HttpError, anthropic_shape, openai_shape, speaks_anthropic
from dovetail_server.request_record import RequestRecord
from dovetail_server.settings import ServerSettings

logger = logging.getLogger("dovetail.server")

OPEN_PATHS = frozenset({"/health", "/ready"})  # without an API key, for those who watch over processes; and the page's frame, for browsers
QUIET_PATHS = frozenset({"/page/live"})  # asked for each second by every page that is open: no line in the log
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})  # they change nothing
_SANE_ID = re.compile(rb"[A-Za-z0-9._:/=+-]{1,128}")
_TRACEPARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}(?:-.*)?")


class RequestLog:
    """Gives each answer a request id, that of the client if it is sane, and logs one line of JSON when it has ended. Anthropic's clients look for
    the id in a header of another name."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app, self._logs = app, settings.log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        scope["dovetail.request_id"] = request_id.decode()
        record: RequestRecord = scope.setdefault("dovetail.record", RequestRecord())
        names = (b"x-request-id", b"request-id") if speaks_anthropic(scope["path"]) else (b"x-request-id",)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *((name, request_id) for name in names)]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            status = status or 500
            raise
        finally:
            if self._logs and scope["path"] not in QUIET_PATHS:
                logger.info("%s", _line(scope, record, status, headers.get(b"traceparent", b"")))


def _line(scope: Scope, record: RequestRecord, status: int, traceparent: bytes) -> str:
    now = time.monotonic()
    line = {
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "request_id": scope["dovetail.request_id"],
        "duration_s": round(now - record.began, 6),
    }
    if record.model is not None:
        line |= {"model": record.model, "prompt_tokens": record.prompt_tokens, "cached_tokens": record.cached_tokens}
        line["completion_tokens"] = record.completion_tokens
    if record.first_output is not None:
        line["first_output_s"] = round(record.first_output - record.began, 6)
    if record.gone:
        line["client_gone"] = True
    if record.error is not None:
        line["error"] = record.error[:500]
    if traced := _TRACEPARENT.fullmatch(traceparent):
        line |= {"trace_id": traced[1].decode(), "parent_id": traced[2].decode()}
    return json.dumps(line)


class ApiKeys:
    """Lets nobody in without a key."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._keys = tuple(key.encode() for key in settings.api_keys)
        self._root = settings.root_path.rstrip("/")
        self._open = OPEN_PATHS | set(live_page.FILES if settings.page else ())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = self._key(dict(scope["headers"])) if scope["type"] == "http" else None
        if key is not None:
            scope["dovetail.key"] = key
        if scope["type"] != "http" or scope["path"].removeprefix(self._root) in self._open or key is not None:
            await self._app(scope, receive, send)
            return
        message = "this server needs an API key: send it as `Authorization: Bearer KEY`, or as `x-api-key: KEY`"
        await _refuse(scope, send, HttpError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"}))

    def _key(self, headers: dict[bytes, bytes]) -> int | None:
        """Return the number of the key that a request has; None if it has none."""
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        offered = [headers.get(b"x-api-key", b""), bearer.strip() if scheme.lower() == b"bearer" else b""]
        found = [[hmac.compare_digest(key, one) for one in offered] for key in self._keys]  # all, so that the time tells nothing
        return next((number for number, same in enumerate(found) if any(same)), None)


class BrowserGuard:
    """Refuses what a browser sends for pages of other sites, which reach this machine but have no API key: for servers without keys.

    Requests that change nothing are let through, since a page can't read the answers. A page whose name was made to point to this machine (DNS
    rebinding) could read them: on loopback, a server answers only to addresses, `localhost` and the names that it was given.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, on_loopback: bool) -> None:
        self._app = app
        self._origins = frozenset(settings.cors_origins)
        self._hosts = frozenset(name.lower() for name in settings.allowed_hosts)
        self._checks_host = on_loopback and "*" not in self._hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._objection(scope)) is not None:
            await _refuse(scope, send, error)
        else:
            await self._app(scope, receive, send)

    def _objection(self, scope: Scope) -> HttpError | None:
        headers = {name: value.decode("latin-1").lower() for name, value in scope["headers"]}
        host, origin = headers.get(b"host", ""), headers.get(b"origin", "")
        if self._checks_host and host and not self._is_known(host):
            message = f"host {host[:200]!r} isn't known here: call this server by its address, or start it with --allowed-host"
            return HttpError(403, message, code="unknown_host")
        if scope["method"] not in _SAFE_METHODS and not self._may_send(headers.get(b"sec-fetch-site"), origin, host):
            message = f"pages of {origin[:200] or 'other sites'} may not call this server: start it with --cors-origin to let them"
            return HttpError(403, message, code="foreign_origin")
        return None

    def _is_known(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return name in self._hosts or name == "localhost" or name.endswith(".localhost") or _is_address(name)

    def _may_send(self, site: str | None, origin: str, host: str) -> bool:
        """`site`: what the browser says of the page, if it is one that does so and takes this server for trustworthy."""
        if not self._origins.isdisjoint((origin, "*")):
            return True
        if site is not None:
            return site in ("same-origin", "none")
        return not origin or origin.partition("://")[2] == host


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


async def _refuse(scope: Scope, send: Send, error: HttpError) -> None:
    """Answer with an error, in the shape that the path's API has."""
    body = error.body(anthropic_shape if speaks_anthropic(scope["path"]) else openai_shape)
    head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    head += [(name.encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": head})
    await send({"type": "http.response.body", "body": body})
