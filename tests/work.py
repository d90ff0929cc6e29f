"""Amount of work in function calls: unlike time, the same on every machine and under any load."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


class TooMuchWorkError(AssertionError):
    """More calls than were allowed."""


@dataclass
class Work:
    """`calls` were made, or `lines` executed, so far."""

    calls: int = 0
    lines: int = 0


@contextmanager
def at_most(calls: int) -> Iterator[Work]:
    """Raise `TooMuchWorkError` in the block once it has called `calls` functions, in Python or C:
    endless work fails soon."""
    work = Work()

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_call"):
            work.calls += 1
            if work.calls > calls:
                sys.setprofile(before)
                raise TooMuchWorkError(f"more than {calls} calls")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield work
    finally:
        sys.setprofile(before)


@contextmanager
def counted_lines() -> Iterator[Work]:
    """Count the lines of Python that the block executes, each as often as it does."""
    work = Work()

    def count(frame: FrameType, event: str, argument: object) -> object:
        work.lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        yield work
    finally:
        sys.settrace(before)
