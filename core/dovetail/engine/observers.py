"""`ObserverHub`: notifies observers and contains their errors, except a `ConfigError` at start."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from dovetail.api.observer import EngineStarted, EngineStopped, Observer
from dovetail.errors import ConfigError

logger = logging.getLogger("dovetail")

MAX_ERRORS = 5  # an observer that raises more often is dropped


class ObserverHub:
    """All observers, called in turn. False without observers; then the core makes no events."""

    def __init__(self, observers: Sequence[tuple[str, Observer]]) -> None:
        self._observers = list(observers)
        self._errors: dict[str, int] = {}
        self.wants_decisions = False
        self._note_wishes()

    def __bool__(self) -> bool:
        return bool(self._observers)

    def start(self, event: EngineStarted) -> None:
        """Call `on_started` of every observer. If one can't do what its options say, its `ConfigError` is raised, and those before it are told that
        the engine stops."""
        started: list[tuple[str, Observer]] = []
        for name, observer in tuple(self._observers):
            try:
                observer.on_started(event)
            except ConfigError as error:
                self._observers = started
                self.tell("on_stopped", EngineStopped(event.time, error))
                raise
            except Exception as error:
                self._contain(name, observer, "on_started", error)
            started.append((name, observer))

    def add(self, name: str, observer: Observer) -> None:
        """Add an observer while the engine runs, between steps. It gets no earlier events; a step in flight may have no decisions."""
        self._observers.append((name, observer))
        self._note_wishes()

    def remove(self, observer: Observer) -> None:
        """Remove an observer. No-op if it was dropped."""
        self._observers = [(name, one) for name, one in self._observers if one is not observer]
        self._note_wishes()

    def tell(self, method: str, event: object) -> None:
        """Call `method` of every observer with `event`."""
        for name, observer in tuple(self._observers):
            try:
                getattr(observer, method)(event)
            except Exception as error:
                self._contain(name, observer, method, error)

    def _note_wishes(self) -> None:
        self.wants_decisions = any(observer.capabilities.decisions for _, observer in self._observers)

    def _contain(self, name: str, observer: Observer, method: str, error: Exception) -> None:
        self._errors[name] = self._errors.get(name, 0) + 1
        if self._errors[name] == 1:
            logger.error("observer %s raised in %s and goes on without this event: %r", name, method, error)
        if self._errors[name] >= MAX_ERRORS:
            logger.error("observer %s raised %d times and is dropped", name, MAX_ERRORS)
            self._observers.remove((name, observer))
