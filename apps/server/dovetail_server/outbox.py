"""`Outbox`: the turns in which all streams of a front end are written, so that a step's outputs don't keep the event loop from the next step.

A write costs several times what the text in it does. While a front end keeps up, each token is written at once; when it doesn't, what has come for a
stream meanwhile goes out in one write, and so the cost of a token falls as the load rises.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import Protocol

from dovetail.errors import DovetailError

logger = logging.getLogger("dovetail")

STALLED_S = 5.0  # a turn that is due for longer than this won't come
_WRITES_A_TURN = 32  # some 0.2 ms: so long the event loop doesn't look for what has come


class Flushed(Protocol):
    """A stream that has something to write."""

    def flush(self) -> None:
        """Write it."""

    def break_off(self) -> None:
        """End, since `flush` has raised."""


class Outbox:
    """Flushes of streams, first come, first served."""

    __slots__ = ("_due", "_streams")

    def __init__(self) -> None:
        self._streams: deque[Flushed] = deque()
        self._due: float | None = None  # since when the next turn is, in seconds of `time.monotonic`

    def put(self, stream: Flushed) -> None:
        """Have a stream flushed soon. An error of its flush ends this stream only."""
        self._streams.append(stream)
        if self._due is None:
            self._schedule()

    def check_health(self) -> None:
        """Raises `DovetailError` if streams are no longer written."""
        if self._due is not None and (late := time.monotonic() - self._due) > STALLED_S:
            raise DovetailError(f"streams haven't been written for {late:.0f} s")

    def _schedule(self) -> None:
        asyncio.get_running_loop().call_soon(self._turn)
        self._due = time.monotonic()

    def _turn(self) -> None:
        streams = self._streams
        for _ in range(min(_WRITES_A_TURN, len(streams))):
            stream = streams.popleft()
            try:
                stream.flush()
            except Exception:
                logger.exception("a stream couldn't be written")
                stream.break_off()
        if streams:
            self._schedule()
        else:
            self._due = None
