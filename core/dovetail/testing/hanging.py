"""Ending a check that hangs, which pytest alone can't. This file imports nothing else of Dovetail."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

AGAIN_S = 1.0  # a component may catch the first interrupt


class Hung(BaseException):
    """The time limit has passed. It isn't an Exception, so that components which catch those don't go on."""

    def __init__(self, frame: FrameType | None) -> None:
        self.frame = frame  # the interrupted one


@contextmanager
def ended_after(seconds: float | None) -> Iterator[None]:
    """Raise `Hung` in the body, in Python code or a wait, once it has run for `seconds`. None: no limit. Nor is there one outside the main
    thread, where no signal arrives, or on systems without such signals."""
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
        signal.setitimer(signal.ITIMER_REAL, *timer)  # another user's timer starts again
        signal.signal(signal.SIGALRM, handler)
