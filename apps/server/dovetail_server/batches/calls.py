"""`call`: a request of a batch, made of the app as if a client had sent it, so that it means what it means over HTTP."""

from __future__ import annotations

import asyncio

from starlette.applications import Starlette
from starlette.types import Message


async def call(app: Starlette, path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
    """Post a body to a path, past the middleware, which asks for keys and logs. Return the status and the body of the answer. Cancelled, it leaves
    nothing behind."""
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
