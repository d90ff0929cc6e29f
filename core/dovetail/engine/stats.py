"""An engine's reports: `EngineStats`, its counts; `ObserverHub`, which notifies observers and
contains their errors, except a `ConfigError` at start; `StormWatch`, a warning of excessive
recomputation."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from dovetail.api.kv_cache import PageCounts
from dovetail.api.observer import EngineStarted, EngineStopped, Observer
from dovetail.engine.flight import InFlightStep
from dovetail.engine.tiers.stats import TierStats
from dovetail.errors import ConfigError

logger = logging.getLogger("dovetail")

# A recompute storm: over this many steps, more tokens are recomputed than computed the first time
STORM_STEPS = 1_000
MAX_ERRORS = 5  # an observer that raises more often is dropped


@dataclass(slots=True)
class EngineStats:
    """Counts since the engine started, and the present state. Times in seconds."""

    waiting: int = 0
    running: int = 0
    steps: int = 0
    arrived: int = 0
    finished: int = 0
    prefill_tokens: int = 0  # tokens computed, including those of re-prefills
    decode_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    preemptions: int = 0
    recomputed_tokens: int = 0
    device_s: float = 0.0
    core_s: float = 0.0  # wall time of the core itself: planning, batches, results
    pages: PageCounts = field(default_factory=lambda: PageCounts(0, 0, 0))
    draft_rows: int = 0  # rows of steps that checked drafts
    draft_tokens: int = 0  # drafts that they checked
    # accepted ones by position: the first of a row, the second, …
    accepted_drafts: list[int] = field(default_factory=list)
    drafting_s: float = 0.0  # time that steps waited for the drafter
    tiers: TierStats | None = None  # of K and V beyond the device; None: there are none
    stalls: int = 0  # steps that the engine planned itself, as the policy would have waited forever

    def count(self, flight: InFlightStep, generated_tokens: int) -> None:
        """Count a step whose results were delivered, but for the core's time."""
        self.steps += 1
        self.prefill_tokens += flight.prefill_tokens
        self.decode_tokens += flight.decode_tokens
        self.generated_tokens += generated_tokens
        self.recomputed_tokens += flight.recomputed_tokens
        self.device_s += flight.seconds
        if flight.drafts:
            self._count_drafts(flight)

    def _count_drafts(self, flight: InFlightStep) -> None:
        """Count the drafts of a step, and how many of each row were accepted."""
        self.draft_rows += len(flight.drafts)
        self.draft_tokens += sum(map(len, flight.drafts.values()))
        rows = Counter(flight.accepted.values())
        most = max(rows, default=0)
        self.accepted_drafts += [0] * (most - len(self.accepted_drafts))
        for position in range(most):
            self.accepted_drafts[position] += sum(
                n for count, n in rows.items() if count > position
            )


class StormWatch:
    """Warns once if, over a thousand steps, more tokens were recomputed after preemptions than
    computed for the first time."""

    def __init__(self, policy_name: str) -> None:
        self._policy_name = policy_name
        self._steps = self._recomputed = self._computed = 0
        self.seen = False

    def saw(self, flight: InFlightStep) -> None:
        self._steps += 1
        self._recomputed += flight.recomputed_tokens
        self._computed += flight.prefill_tokens + flight.decode_tokens - flight.recomputed_tokens
        if self._steps < STORM_STEPS:
            return
        if self._recomputed > self._computed and not self.seen:
            self.seen = True
            logger.warning(
                "scheduler %s preempts so much that %d tokens were recomputed and only %d computed "
                "anew in the last %d steps",
                self._policy_name,
                self._recomputed,
                self._computed,
                self._steps,
            )
        self._steps = self._recomputed = self._computed = 0


class ObserverHub:
    """All observers, called in turn."""

    def __init__(self, observers: Sequence[tuple[str, Observer]]) -> None:
        self._observers = list(observers)
        self._errors: dict[str, int] = {}
        self.listens = False  # True if there are any; otherwise the core makes no events
        self.wants_decisions = False
        self._note_wishes()

    def start(self, event: EngineStarted) -> None:
        """Call `on_started` of every observer.

        If one can't do what its options say, its `ConfigError` is raised, and those before it are
        told that the engine stops.
        """
        started: list[tuple[str, Observer]] = []
        for name, observer in tuple(self._observers):
            try:
                observer.on_started(event)
            except ConfigError as error:
                self._observers = started
                self._note_wishes()
                self.tell("on_stopped", EngineStopped(event.time, error))
                raise
            except Exception as error:
                self._contain(name, observer, "on_started", error)
            started.append((name, observer))

    def add(self, name: str, observer: Observer) -> None:
        """Add an observer while the engine runs, between steps.

        It gets no earlier events; a step in flight may have no decisions.
        """
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
        self.listens = bool(self._observers)
        self.wants_decisions = any(
            observer.capabilities.decisions for _, observer in self._observers
        )

    def _contain(self, name: str, observer: Observer, method: str, error: Exception) -> None:
        self._errors[name] = self._errors.get(name, 0) + 1
        if self._errors[name] == 1:
            logger.error(
                "observer %s raised in %s and goes on without this event: %r", name, method, error
            )
        if self._errors[name] >= MAX_ERRORS:
            logger.error("observer %s raised %d times and is dropped", name, MAX_ERRORS)
            self._observers.remove((name, observer))
            self._note_wishes()
