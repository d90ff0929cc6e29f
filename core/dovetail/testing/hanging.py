"""Ends a check that hangs where it runs, which is what pytest has no means of by itself. Imports nothing of the rest of Dovetail."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

AGAIN_S = 1.0  # a component may catch what it is interrupted by, once


class Hung(BaseException):
    """The time is over. No Exception, so that components which catch those don't go on."""

    def __init__(self, frame: FrameType | None) -> None:
        self.frame = frame  # that was interrupted


@contextmanager
def ended_after(seconds: float | None) -> Iterator[None]:
    """Raises `Hung` out of what runs in it for longer, in Python or waiting. None: it may take for ever, as it may outside the main thread, where no
    signal arrives, and on systems without such signals."""
    if seconds is None or threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise Hung(frame)

    handler = signal.signal(signal.SIGALRM, end)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)  # somebody else's begins anew
        signal.signal(signal.SIGALRM, handler)
