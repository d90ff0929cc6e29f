"""`Admission`: limits on requests and tokens that wait for a first token and on bytes of bodies, and the `Retry-After` of rejected requests."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque

from dovetail_server.bodies import HeldBytes
from dovetail_server.engine import ServedEngine
from dovetail_server.errors import HttpError
from dovetail_server.settings import ServerSettings

_REMEMBERED = 128  # recent first tokens, from which the queue's rate is estimated
_LONGEST_RETRY_S = 60


def busy(reason: str, retry_s: int = 1) -> HttpError:
    """Return the error for a rejected request, with the time to retry."""
    return HttpError(429, f"the server is busy: {reason}; try again in {retry_s} s", code="too_many_requests", headers={"Retry-After": str(retry_s)})


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
    """Counts waiting requests of this front end, and considers the engine's load from other front ends."""

    def __init__(self, engine: ServedEngine, settings: ServerSettings) -> None:
        self._engine, self._settings = engine, settings
        self.queued_requests = 0
        self.queued_tokens = 0
        self.bodies = HeldBytes(settings.max_received_bytes)
        self._began: deque[float] = deque(maxlen=_REMEMBERED)
        self._left = asyncio.Event()

    def check(self, requests: int, tokens: int) -> None:
        """Raise `HttpError` 429 if so many more exceed a limit now, and 400 if they always do."""
        waiting = max(self.queued_requests, self._engine.load.waiting)
        most, most_tokens = self._settings.max_queued_requests, self._settings.max_queued_tokens
        if most is not None and requests > most:
            raise HttpError(400, f"the request has {requests} prompts, and max_queued_requests is {most}: send fewer at once", param="prompt")
        if most is not None and waiting + requests > most:
            reason = f"{waiting} requests are waiting, and max_queued_requests is {most}"
            raise busy(reason, self._retry_after_s(waiting + requests - most))
        if most_tokens is not None and self.queued_requests and self.queued_tokens + tokens > most_tokens:
            reason = f"{self.queued_tokens} tokens of prompts are waiting, and max_queued_tokens is {most_tokens}"
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
