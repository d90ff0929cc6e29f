"""The engine's clock, which can be replaced: a wall clock for serving, a virtual one for simulation."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod


class Clock(ABC):
    """A clock that counts seconds from an arbitrary start and never goes backwards."""

    @abstractmethod
    def now(self) -> float:
        """Return the current time in seconds."""

    @abstractmethod
    def wait_until(self, instant: float) -> None:
        """Wait until `instant`, or a little longer on a clock of real time; return at once if it has passed."""


LONGEST_SLEEP_S = 1e6  # of one sleep: the system refuses some of the durations that a float can hold


class WallClock(Clock):
    """A clock of real time."""

    def now(self) -> float:
        return time.perf_counter()

    def wait_until(self, instant: float) -> None:
        while (remaining := instant - time.perf_counter()) > 0:
            time.sleep(min(remaining, LONGEST_SLEEP_S))


class VirtualClock(Clock):
    """A clock that stands still until it is moved: by an executor in `collect`, or by the engine while it is idle."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def wait_until(self, instant: float) -> None:
        self._now = max(self._now, instant)
