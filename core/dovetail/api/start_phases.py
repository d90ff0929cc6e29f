"""Seconds of an engine's start by phase, for its log and for `Capacity.details`.

    with measuring_start() as phases:
        with phase("imports"):
            import torch
    log.info("ready after %s", phases)          # ready after 3.2 s: imports 2.1, other 1.1

Code that may run during a start wraps its parts in `phase`; outside of a start, and in other
threads, that does nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

LEAST_S = 0.05  # shorter phases are added to "other"


class StartPhases:
    """Seconds of each phase since the instance was made. A phase within another interrupts it, so
    that phases add up to the whole."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._begun = now()
        self._changed = self._begun
        self._current = ["other"]
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time within this context for the phase `name`, which may recur."""
        self._count()
        self._current.append(name)
        try:
            yield
        finally:
            self._count()
            self._current.pop()

    @property
    def total_s(self) -> float:
        """Seconds since the instance was made."""
        return self._now() - self._begun

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase, in the order in which they first ended; "other" is the rest."""
        self._count()
        return dict(self._seconds)

    def __str__(self) -> str:
        """Return a text such as "3.2 s: imports 2.1, weights 0.4, other 0.7"."""
        seconds = self.seconds
        rest = seconds.pop("other", 0.0)
        rest += sum(each for each in seconds.values() if each < LEAST_S)
        shown = {name: each for name, each in seconds.items() if each >= LEAST_S}
        parts = ", ".join(f"{name} {each:.1f}" for name, each in {**shown, "other": rest}.items())
        return f"{self._changed - self._begun:.1f} s: {parts}"

    def _count(self) -> None:
        """Count the time since the last change of phase."""
        now = self._now()
        name = self._current[-1]
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._changed
        self._changed = now


_phases: ContextVar[StartPhases | None] = ContextVar("_phases", default=None)


@contextmanager
def measuring_start() -> Iterator[StartPhases]:
    """Context in which `phase` counts for the `StartPhases` that it returns."""
    phases = StartPhases()
    token = _phases.set(phases)
    try:
        yield phases
    finally:
        _phases.reset(token)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Count the time within this context for this phase of the start that is being measured, if
    there is one."""
    phases = _phases.get()
    if phases is None:
        yield
        return
    with phases.phase(name):
        yield
