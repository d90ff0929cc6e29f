"""Reception of request bodies: `receive_body` enforces the limits of one, `HeldBytes` those of all together. Used by the server and the cluster's
gate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from starlette.types import Receive, Scope

from dovetail_server.errors import HttpError
from dovetail_server.streams import ClientGone

SLOWEST_BYTES_S = 65_536  # minimum average rate of a body after its timeout
SMALL_BODY_BYTES = 65_536  # bodies up to this size are always accepted, so that large ones don't block ordinary requests


class HeldBytes:
    """Accounts for the bytes of bodies in memory, over all connections."""

    def __init__(self, most: int) -> None:
        self.held, self._most = 0, most

    def take(self, size: int, before: int) -> None:
        """Acquire `size` more bytes for a body that holds `before`. Raises `HttpError` 429 above the limit."""
        if self.held + size > self._most and before + size > SMALL_BODY_BYTES:
            reason = f"the server is busy: bodies of {self.held} bytes are being received, and max_received_bytes is {self._most}; try again in 1 s"
            raise HttpError(429, reason, code="too_many_requests", headers={"Retry-After": "1"})
        self.held += size

    def release(self, size: int) -> None:
        self.held -= size


async def receive_body(
    scope: Scope, receive: Receive, most: int, too_large: HttpError, timeout_s: float | None, hold: Callable[[int], None]
) -> AsyncGenerator[bytes, None]:
    """Yield a body in chunks. `hold`: called with its size so far. Raises `HttpError` 408 if it takes longer than `timeout_s` plus the time for its
    size, `too_large` above `most` bytes, `ClientGone`, and what `hold` raises."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and (len(value) > 18 or int(value) > most):
            raise too_large
    began = asyncio.get_running_loop().time()
    size, more = 0, True
    while more:
        try:
            async with asyncio.timeout_at(None if timeout_s is None else began + timeout_s + size / SLOWEST_BYTES_S):
                message = await receive()
        except TimeoutError:
            raise HttpError(408, f"the body took too long: {size} bytes received (body_timeout_s is {timeout_s:g})", code="timeout") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        data, more = message.get("body", b""), message.get("more_body", False)
        size += len(data)
        if size > most:
            raise too_large
        hold(size)
        yield data
