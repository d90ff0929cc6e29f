"""`Outbox`: the turns in which all streams of a front end are written, so that a step's outputs don't keep the event loop from the next step.

A write costs several times what the text in it does. While a front end keeps up, each token is written at once; when it doesn't, what has come for a
stream meanwhile goes out in one write, and so the cost of a token falls as the load rises.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

_WRITES_A_TURN = 32  # some 0.2 ms: so long the event loop doesn't look for what has come


class Outbox:
    """Flushes of streams, first come, first served."""

    __slots__ = ("_flushes", "_scheduled")

    def __init__(self) -> None:
        self._flushes: deque[Callable[[], None]] = deque()
        self._scheduled = False

    def put(self, flush: Callable[[], None]) -> None:
        """Have a stream flushed soon."""
        self._flushes.append(flush)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        flushes = self._flushes
        for _ in range(min(_WRITES_A_TURN, len(flushes))):
            flushes.popleft()()
        if flushes:
            asyncio.get_running_loop().call_soon(self._turn)
        else:
            self._scheduled = False
