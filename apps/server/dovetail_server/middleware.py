"""ASGI middleware: request ids and log lines, API keys, and protection from other sites' pages for
servers without keys."""

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
from dovetail_server.errors import HttpError, speaks_anthropic
from dovetail_server.settings import ServerSettings
from dovetail_server.tracing import RequestRecord

logger = logging.getLogger("dovetail.server")

OPEN_PATHS = frozenset({"/health", "/ping", "/ready"})  # need no API key
QUIET_PATHS = frozenset({"/page/live"})  # not logged: every open page requests it each second
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})  # they change nothing
_SANE_ID = re.compile(rb"[A-Za-z0-9._:/=+-]{1,128}")
_TRACEPARENT = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}(?:-.*)?"
)


class RequestLog:
    """Adds a request id to each response, the client's if valid, and logs one line of JSON at its
    end. Anthropic's clients expect the id in another header, too."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._logs = settings.log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        scope["dovetail.request_id"] = request_id.decode()
        record: RequestRecord = scope.setdefault("dovetail.record", RequestRecord())
        names = (
            (b"x-request-id", b"request-id")
            if speaks_anthropic(scope["path"])
            else (b"x-request-id",)
        )
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    *((name, request_id) for name in names),
                ]
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
        line |= {
            "model": record.model,
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
        }
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
    """Rejects requests without a valid API key."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._keys = tuple(key.encode() for key in settings.api_keys)
        self._root = settings.root_path.rstrip("/")
        self._open = OPEN_PATHS | set(live_page.FILES if settings.page else ())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = self._key(dict(scope["headers"])) if scope["type"] == "http" else None
        if key is not None:
            scope["dovetail.key"] = key
        if (
            scope["type"] != "http"
            or scope["path"].removeprefix(self._root) in self._open
            or key is not None
        ):
            await self._app(scope, receive, send)
            return
        message = (
            "this server needs an API key: send it as `Authorization: Bearer KEY`, or as "
            "`x-api-key: KEY`"
        )
        error = HttpError(
            401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"}
        )
        await error.response(scope["path"])(scope, receive, send)

    def _key(self, headers: dict[bytes, bytes]) -> int | None:
        """Return the index of a request's key; None if it has no valid one."""
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        offered = [
            headers.get(b"x-api-key", b""),
            bearer.strip() if scheme.lower() == b"bearer" else b"",
        ]
        # all of them, in constant time
        found = [[hmac.compare_digest(key, one) for one in offered] for key in self._keys]
        return next((number for number, same in enumerate(found) if any(same)), None)


class BrowserGuard:
    """Rejects requests that a browser sends on behalf of other sites' pages. For servers without
    API keys.

    Safe methods are allowed, since the page can't read the answers. With DNS rebinding it could: on
    loopback, a server therefore answers only to IP addresses, `localhost` and configured names.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, on_loopback: bool) -> None:
        self._app = app
        self._origins = frozenset(settings.cors_origins)
        self._hosts = frozenset(name.lower() for name in settings.allowed_hosts)
        self._checks_host = on_loopback and "*" not in self._hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._objection(scope)) is not None:
            await error.response(scope["path"])(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _objection(self, scope: Scope) -> HttpError | None:
        headers = {name: value.decode("latin-1").lower() for name, value in scope["headers"]}
        host = headers.get(b"host", "")
        origin = headers.get(b"origin", "")
        if self._checks_host and host and not self._is_known(host):
            message = (
                f"host {host[:200]!r} isn't known here: call this server by its address, or "
                f"start it with --allowed-host"
            )
            return HttpError(403, message, code="unknown_host")
        if scope["method"] not in _SAFE_METHODS and not self._may_send(
            headers.get(b"sec-fetch-site"), origin, host
        ):
            message = (
                f"pages of {origin[:200] or 'other sites'} may not call this server: start "
                f"it with --cors-origin to let them"
            )
            return HttpError(403, message, code="foreign_origin")
        return None

    def _is_known(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return (
            name in self._hosts
            or name == "localhost"
            or name.endswith(".localhost")
            or _is_address(name)
        )

    def _may_send(self, site: str | None, origin: str, host: str) -> bool:
        """`site`: the header `sec-fetch-site`, which browsers send to trustworthy servers only."""
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
