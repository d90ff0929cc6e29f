"""`Admission`: limits on requests and tokens that wait for a first token, and the `Retry-After` of
rejected requests.

`BoundedReceive` enforces the limits of one body, `HeldBytes` those of all together; the cluster's
gate uses both, too.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager

from starlette.types import Message, Receive, Scope

from dovetail_server.engine import ServedEngine
from dovetail_server.errors import HttpError
from dovetail_server.settings import ServerSettings
from dovetail_server.streams import ClientGone

SLOWEST_BYTES_S = 65_536  # minimum average rate of a body after its timeout
# bodies up to this size are always accepted, so that large ones don't block ordinary requests
SMALL_BODY_BYTES = 65_536
IMAGE_BYTES = 6 * 2**20  # of a prepared image, about: of 1,024 x 1,024 pixels for Qwen3-VL
_REMEMBERED = 128  # recent first tokens, from which the queue's rate is estimated
_LONGEST_RETRY_S = 60


def busy(reason: str, retry_s: int = 1) -> HttpError:
    """Return the error for a rejected request, with the time to retry."""
    return HttpError(
        429,
        f"the server is busy: {reason}; try again in {retry_s} s",
        code="too_many_requests",
        headers={"Retry-After": str(retry_s)},
    )


class HeldBytes:
    """Accounts for the bytes of bodies in memory, over all connections."""

    def __init__(self, most: int) -> None:
        self.held = 0
        self._most = most

    def take(self, size: int, before: int) -> None:
        """Acquire `size` more bytes for a body that holds `before`. Raises `HttpError` 429 above
        the limit."""
        if self.held + size > self._most and before + size > SMALL_BODY_BYTES:
            raise busy(
                f"bodies of {self.held} bytes are being received, and max_received_bytes is "
                f"{self._most}"
            )
        self.held += size

    def release(self, size: int) -> None:
        self.held -= size


class HeldImages:
    """Accounts for the bytes of prepared images of unfinished requests, and for those of images
    that are being prepared, whose size is estimated."""

    def __init__(self, most: int) -> None:
        self.held = 0
        self._most = most

    @contextmanager
    def preparing(self, count: int) -> Iterator[None]:
        """Account for `count` images. Raises `HttpError` 429 as `take` does."""
        size = count * IMAGE_BYTES
        self.take(size)
        try:
            yield
        finally:
            self.release(size)

    def take(self, size: int) -> None:
        """Reserve `size` bytes for the images of a request. Raises `HttpError` 429 above the limit,
        unless no other request has images."""
        if self.held and self.held + size > self._most:
            raise busy(
                f"its requests have {self.held} bytes of prepared images, and max_held_image_bytes "
                f"is {self._most}"
            )
        self.held += size

    def release(self, size: int) -> None:
        self.held -= size


class HeldBody:
    """The bytes of one body that are in memory, which `HeldBytes` counts with those of others."""

    def __init__(self, bodies: HeldBytes) -> None:
        self._bodies = bodies
        self._size = 0

    def grow_to(self, size: int) -> None:
        """Hold `size` bytes. Raises `HttpError` 429 above the limit of all bodies."""
        self._bodies.take(size - self._size, self._size)
        self._size = size

    def release(self) -> None:
        """Hold nothing any more."""
        self._bodies.release(self._size)
        self._size = 0


def body_too_large(most: int) -> HttpError:
    """Return the error for a body of more than `most` bytes."""
    return HttpError(
        413, f"the body is larger than {most} bytes (max_body_bytes)", code="body_too_large"
    )


class BoundedReceive:
    """ASGI's `receive` of one request, with limits on its body. Calls may be cancelled."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        most: int,
        too_large: HttpError,
        timeout_s: float | None,
        hold: Callable[[int], None],
    ) -> None:
        """`hold`: called with the body's size so far."""
        self._scope = scope
        self._receive = receive
        self._most = most
        self._too_large = too_large
        self._timeout_s = timeout_s
        self._hold = hold
        self._began = asyncio.get_running_loop().time()
        self._size = 0
        self.is_whole = False  # the body has been received

    async def __call__(self) -> Message:
        """Return the next message. Raises `HttpError` 408 if the body takes longer than `timeout_s`
        plus the time for its size, `too_large` above `most` bytes, and what `hold` raises."""
        if self.is_whole:
            return await self._receive()
        if self._size == 0:
            self._check_declared_size()
        message = await self._next()
        if message["type"] == "http.request":
            self._size += len(message.get("body", b""))
            self.is_whole = not message.get("more_body", False)
            if self._size > self._most:
                raise self._too_large
            self._hold(self._size)
        return message

    def _check_declared_size(self) -> None:
        for name, value in self._scope["headers"]:
            is_length = name == b"content-length" and value.isdigit()
            if is_length and (len(value) > 18 or int(value) > self._most):
                raise self._too_large

    async def _next(self) -> Message:
        limit_s = self._timeout_s
        until = None if limit_s is None else self._began + limit_s + self._size / SLOWEST_BYTES_S
        try:
            async with asyncio.timeout_at(until):
                return await self._receive()
        except TimeoutError:
            raise HttpError(
                408,
                f"the body took too long: {self._size} bytes received (body_timeout_s is "
                f"{limit_s:g})",
                code="timeout",
            ) from None


async def receive_body(receive: BoundedReceive) -> AsyncGenerator[bytes, None]:
    """Yield a body in chunks. Raises what `receive` raises, and `ClientGone`."""
    while not receive.is_whole:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        yield message.get("body", b"")


class Ticket:
    """One admitted request, until its first token or its end."""

    __slots__ = ("_admission", "tokens")

    def __init__(self, admission: Admission, tokens: int) -> None:
        self._admission: Admission | None = admission
        self.tokens = tokens

    def leave(self, *, begun: bool) -> None:
        """Note the first token (`begun`) or the end. Idempotent."""
        if self._admission is not None:
            self._admission.left(self, begun=begun)
            self._admission = None


class Admission:
    """Counts this front end's requests that wait for an engine, and considers the engine's load
    from other front ends."""

    def __init__(self, engine: ServedEngine, settings: ServerSettings) -> None:
        self._engine = engine
        self._settings = settings
        self.queued_requests = 0
        self.queued_tokens = 0
        self._began: deque[float] = deque(maxlen=_REMEMBERED)
        self._left = asyncio.Event()

    def check(self, requests: int, tokens: int) -> None:
        """Raise `HttpError` 429 if so many more exceed a limit now, and 400 if they always do."""
        waiting = max(self.queued_requests, self._engine.load.waiting)
        most = self._settings.max_queued_requests
        most_tokens = self._settings.max_queued_tokens
        if most is not None and requests > most:
            raise HttpError(
                400,
                f"the request has {requests} prompts, and max_queued_requests is {most}: send "
                f"fewer at once",
                param="prompt",
            )
        if most is not None and waiting + requests > most:
            reason = f"{waiting} requests are waiting, and max_queued_requests is {most}"
            raise busy(reason, self._retry_after_s(waiting + requests - most))
        if (
            most_tokens is not None
            and self.queued_requests
            and self.queued_tokens + tokens > most_tokens
        ):
            reason = (
                f"{self.queued_tokens} tokens of prompts are waiting, and max_queued_tokens "
                f"is {most_tokens}"
            )
            raise busy(reason, self._retry_after_s(1))

    def enter(self, tokens: int) -> Ticket:
        """Admit a request."""
        self.queued_requests += 1
        self.queued_tokens += tokens
        return Ticket(self, tokens)

    def left(self, ticket: Ticket, *, begun: bool) -> None:
        self.queued_requests -= 1
        self.queued_tokens -= ticket.tokens
        if begun:
            self._began.append(time.monotonic())
        self._left.set()

    async def wait_until_empty(self) -> None:
        """Wait until every admitted request has its first token or has ended."""
        while self.queued_requests:
            self._left.clear()
            await self._left.wait()

    def _retry_after_s(self, excess: int) -> int:
        """Estimate the seconds until `excess` requests will have left the queue; 1 if unknown."""
        if len(self._began) < 2:
            return 1
        each_s = (time.monotonic() - self._began[0]) / (len(self._began) - 1)
        return max(1, min(_LONGEST_RETRY_S, math.ceil(each_s * excess)))
