"""Timeout for a check, which pytest itself lacks."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from dovetail.registry.doctor.process import OwnTime

ASKED_S = 1.0  # polling interval; a component may catch the first interrupt


class Hung(BaseException):
    """Timeout of a check. Not an Exception, so that components don't catch it."""

    def __init__(self, frame: FrameType | None) -> None:
        self.frame = frame  # the interrupted one


@contextmanager
def ended_after(seconds: float | None) -> Iterator[None]:
    """Raise `Hung` in the body, in Python code or a wait, after `seconds` as counted by `OwnTime`;
    None: no limit. The count begins after `ASKED_S`, since most checks have ended by then and to
    begin it asks for each thread; a shorter limit is doubled. There is no limit outside of the main
    thread, which alone receives signals, or on systems without such signals."""
    if (
        seconds is None
        or threading.current_thread() is not threading.main_thread()
        or not hasattr(signal, "setitimer")
    ):
        yield
        return

    interval_s = min(seconds, ASKED_S)
    own: OwnTime | None = None

    def check_time(number: int, frame: FrameType | None) -> None:
        nonlocal own
        if own is None:
            own = OwnTime(os.getpid())
        elif own.elapsed_s() >= seconds:
            raise Hung(frame)

    handler = signal.signal(signal.SIGALRM, check_time)
    timer = signal.setitimer(signal.ITIMER_REAL, interval_s, interval_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)  # another user's timer starts again
        signal.signal(signal.SIGALRM, handler)
