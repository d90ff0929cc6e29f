"""`call`: sends a batch's request to the app like a client, so that it has the same meaning as over HTTP."""

from __future__ import annotations

import asyncio

from starlette.applications import Starlette
from starlette.types import Message


async def call(app: Starlette, path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
    """POST a body to a path, bypassing the middleware for keys and logs. Return the response's status and body. Cancellation leaves nothing
    behind."""
    status, parts, asked = 0, [], False
    never = asyncio.Event()

    async def receive() -> Message:
        nonlocal asked
        if asked:
            await never.wait()  # for a disconnect
        asked = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
        "app": app,
        "dovetail.request_id": request_id,
    }
    await app.router(scope, receive, send)
    return status, b"".join(parts)
