"""What the scheduler decided in the last steps, for the page: counts alone, nothing of anybody's request. The engine's host has a `DecisionWatch`.

Noting decisions costs a step some time, so it is done only while somebody asks.
"""

from __future__ import annotations

import time
from collections import Counter, deque

from dovetail.api.observer import Observer, ObserverCapabilities, StepFinished
from dovetail.engine.core import EngineCore
from dovetail_server.engine import DecidedStep, Decisions

SHOWN_STEPS = 12
WATCHED_S = 5.0  # after the last question


class DecisionLog(Observer):
    """Keeps the counts of the last steps."""

    capabilities = ObserverCapabilities(decisions=True)

    def __init__(self) -> None:
        self.steps: deque[DecidedStep] = deque(maxlen=SHOWN_STEPS)

    def on_step(self, event: StepFinished) -> None:
        if not event.decisions:  # it was planned before anybody asked
            return
        acts = Counter(decision.act for decision in event.decisions)
        self.steps.append(
            DecidedStep(
                event.index,
                granted=acts["granted"],
                prefill_tokens=event.prefill_tokens,
                decode_tokens=event.decode_tokens,
                refused=acts["refused"],
                preempted=acts["preempted"],
                rejected=acts["rejected"],
                running=event.running,
                waiting=event.waiting,
            )
        )


class DecisionWatch:
    """Has a core's decisions noted from a question on until nobody has asked for a while. It is called in the engine's thread, between steps."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._log: DecisionLog | None = None
        self._asked = 0.0

    def ask(self) -> Decisions:
        """Return what is known, and see to it that more will be."""
        self._asked = time.monotonic()
        if self._log is None:
            self._log = DecisionLog()
            self._core.observers.add("of the page", self._log)
        return Decisions(self._core.settings.scheduler_name, tuple(self._log.steps))

    def rest(self) -> None:
        """Stop if nobody asks any more."""
        if self._log is not None and time.monotonic() - self._asked > WATCHED_S:
            self._core.observers.remove(self._log)
            self._log = None
