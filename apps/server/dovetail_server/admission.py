"""`Admission`: how many requests and tokens may wait for their first token, how many bytes of bodies are held, and when a client that is turned away
should come again."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque

from dovetail_server.bodies import HeldBytes
from dovetail_server.engine import ServedEngine
from dovetail_server.errors import HttpError
from dovetail_server.settings import ServerSettings

_REMEMBERED = 128  # first tokens by which the queue's speed is judged
_LONGEST_RETRY_S = 60


def busy(reason: str, retry_s: int = 1) -> HttpError:
    """Return the error for a request that is turned away, and when it should come again."""
    return HttpError(429, f"the server is busy: {reason}; try again in {retry_s} s", code="too_many_requests", headers={"Retry-After": str(retry_s)})


class Ticket:
    """One admitted request, until its first token or its end. Both may be told more than once."""

    __slots__ = ("_admission", "tokens")

    def __init__(self, admission: Admission, tokens: int) -> None:
        self._admission: Admission | None = admission
        self.tokens = tokens

    def leave(self, *, begun: bool) -> None:
        """It waits no more: because its first token has come (`begun`), or because it has ended."""
        if self._admission is not None:
            self._admission.left(self, begun=begun)
            self._admission = None


class Admission:
    """Counts what waits in this front end, and looks at what the engine says of the others' requests."""

    def __init__(self, engine: ServedEngine, settings: ServerSettings) -> None:
        self._engine, self._settings = engine, settings
        self.queued_requests = 0
        self.queued_tokens = 0
        self.bodies = HeldBytes(settings.max_received_bytes)
        self._began: deque[float] = deque(maxlen=_REMEMBERED)
        self._left = asyncio.Event()

    def check(self, requests: int, tokens: int) -> None:
        """Raises `HttpError` 429 if so many more are too many now, and 400 if they always are: trying again wouldn't help."""
        waiting = max(self.queued_requests, self._engine.load.waiting)
        most, most_tokens = self._settings.max_queued_requests, self._settings.max_queued_tokens
        if most is not None and requests > most:
            raise HttpError(400, f"the request has {requests} prompts, and max_queued_requests is {most}: send fewer at once", param="prompt")
        if most is not None and waiting + requests > most:
            raise self._refusal(f"{waiting} requests are waiting, and max_queued_requests is {most}", waiting + requests - most)
        if most_tokens is not None and self.queued_requests and self.queued_tokens + tokens > most_tokens:
            raise self._refusal(f"{self.queued_tokens} tokens of prompts are waiting, and max_queued_tokens is {most_tokens}", 1)

    def enter(self, tokens: int) -> Ticket:
        """Count a request with so many tokens as waiting."""
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
        """Wait until every request that was let in has its first token, or has ended."""
        while self.queued_requests:
            self._left.clear()
            await self._left.wait()

    def _refusal(self, reason: str, excess: int) -> HttpError:
        return busy(reason, self._retry_after_s(excess))

    def _retry_after_s(self, excess: int) -> int:
        """Seconds until so many will have left the queue, at the speed of the last ones; 1 if nothing is known."""
        if len(self._began) < 2:
            return 1
        each_s = (time.monotonic() - self._began[0]) / (len(self._began) - 1)
        return max(1, min(_LONGEST_RETRY_S, math.ceil(each_s * excess)))
