"""The engine's clock, which can be replaced: a wall clock for serving, a virtual one for simulation."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod


class Clock(ABC):
    """Seconds since an arbitrary start; never goes backwards."""

    @abstractmethod
    def now(self) -> float:
        """The present instant, in seconds."""

    @abstractmethod
    def wait_until(self, instant: float) -> None:
        """Return at `instant` or, on a clock of real time, perhaps a little later; at once if it has passed."""


LONGEST_SLEEP_S = 1e6  # at once: the system's own limit is further away, but not by as much as a float can say


class WallClock(Clock):
    """Real time."""

    def now(self) -> float:
        return time.perf_counter()

    def wait_until(self, instant: float) -> None:
        while (remaining := instant - time.perf_counter()) > 0:
            time.sleep(min(remaining, LONGEST_SLEEP_S))


class VirtualClock(Clock):
    """Time that stands still until somebody moves it: an executor in `collect`, the engine in an idle wait."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def wait_until(self, instant: float) -> None:
        self._now = max(self._now, instant)
