"""The engine's clocks: a wall clock for serving, a virtual one for simulation."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod


class Clock(ABC):
    """Monotonic clock that counts seconds from an arbitrary start."""

    @abstractmethod
    def now(self) -> float:
        """Return the current time in seconds."""

    @abstractmethod
    def wait_until(self, instant: float) -> None:
        """Wait at least until `instant`; return at once if it has passed."""


LONGEST_SLEEP_S = 1e6  # per call of time.sleep, which rejects very large durations


class WallClock(Clock):
    """Real time."""

    def now(self) -> float:
        return time.perf_counter()

    def wait_until(self, instant: float) -> None:
        while (remaining := instant - time.perf_counter()) > 0:
            time.sleep(min(remaining, LONGEST_SLEEP_S))


class VirtualClock(Clock):
    """Simulated time, advanced only by an executor in `collect`, or by the engine while it is
    idle."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def wait_until(self, instant: float) -> None:
        self._now = max(self._now, instant)
