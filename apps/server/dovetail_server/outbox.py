"""`Outbox`: writes all streams of a front end in bounded turns, so that a step's outputs don't delay the next step.

A write costs several times its text. While a front end keeps up, each token is written at once; otherwise a stream's pending tokens are coalesced in
one write, so that the cost per token falls as the load rises.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import Protocol

from dovetail.errors import DovetailError

logger = logging.getLogger("dovetail")

STALLED_S = 5.0  # a turn overdue for longer than this counts as stalled
_WRITES_A_TURN = 32  # about 0.2 ms, during which the event loop handles nothing else


class BufferedStream(Protocol):
    """A stream that an `Outbox` writes."""

    def flush(self) -> None:
        """Write what is buffered."""

    def break_off(self) -> None:
        """End the stream after a failed write."""


class Outbox:
    """FIFO of streams to flush."""

    __slots__ = ("_due", "_streams")

    def __init__(self) -> None:
        self._streams: deque[BufferedStream] = deque()
        self._due: float | None = None  # time for which the next turn is scheduled (`time.monotonic`)

    def put(self, stream: BufferedStream) -> None:
        """Schedule a flush. An error of it ends only that stream."""
        self._streams.append(stream)
        if self._due is None:
            self._schedule()

    def check_health(self) -> None:
        """Raise `DovetailError` if streams are no longer written."""
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
                logger.exception("failed to write a stream")
                stream.break_off()
        if streams:
            self._schedule()
        else:
            self._due = None
