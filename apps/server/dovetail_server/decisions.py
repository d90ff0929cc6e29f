"""The scheduler's decisions of the last steps, for the page: counts alone, nothing of anybody's request. The engine's host has a `DecisionWatch`.

Noting decisions makes a step several times as dear to the core, so each question has a few steps noted, and no more.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque

from dovetail.api.observer import Observer, ObserverCapabilities, StepFinished
from dovetail.engine.core import EngineCore
from dovetail_server.engine import DecidedStep, Decisions

NOTED_STEPS = 12  # after a question, and as many are told
REST_S = 0.5  # between two questions that have steps noted


class DecisionLog(Observer):
    """Keeps the counts of the last steps."""

    capabilities = ObserverCapabilities(decisions=True)

    def __init__(self) -> None:
        self.steps: deque[DecidedStep] = deque(maxlen=NOTED_STEPS)
        self.left = 0  # steps to note

    def on_step(self, event: StepFinished) -> None:
        if not event.decisions:  # it was planned before anybody asked
            return
        self.left -= 1
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
    """Has the decisions of a core's next steps noted when somebody asks. It is called in the engine's thread, between steps."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._log = DecisionLog()
        self._noting = False
        self._asked = -math.inf

    def ask(self) -> Decisions:
        """Return what is known, and see to it that more will be."""
        now = time.monotonic()
        if now - self._asked >= REST_S:
            self._asked = now
            self._log.left = NOTED_STEPS
            if not self._noting:
                self._noting = True
                self._core.observers.add("of the page", self._log)
        return Decisions(self._core.settings.scheduler_name, tuple(self._log.steps))

    def rest(self) -> None:
        """Stop once enough steps are noted."""
        if self._noting and self._log.left <= 0:
            self._noting = False
            self._core.observers.remove(self._log)
