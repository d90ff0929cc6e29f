"""`DecisionWatch` counts the scheduler's latest decisions, for the page; the counts contain nothing
of individual requests.

Recording decisions makes a step several times as expensive for the core, so only a few steps are
recorded after each request for them.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque

from dovetail.api.observer import Act, Observer, ObserverCapabilities, StepFinished
from dovetail.serving import EngineCore
from dovetail_server.engine import DecidedStep, Decisions

NOTED_STEPS = 12  # recorded after a request, and returned
REST_S = 0.5  # between two requests that start recording


class DecisionLog(Observer):
    """Keeps the counts of the latest steps."""

    capabilities = ObserverCapabilities(decisions=True)

    def __init__(self) -> None:
        self.steps: deque[DecidedStep] = deque(maxlen=NOTED_STEPS)
        self.left = 0  # steps to record

    def on_step(self, event: StepFinished) -> None:
        if not event.decisions:  # planned before recording began
            return
        self.left -= 1
        acts = Counter(decision.act for decision in event.decisions)
        self.steps.append(
            DecidedStep(
                event.index,
                granted=acts[Act.GRANTED],
                prefill_tokens=event.prefill_tokens,
                decode_tokens=event.decode_tokens,
                refused=acts[Act.REFUSED],
                preempted=acts[Act.PREEMPTED],
                rejected=acts[Act.REJECTED],
                running=event.running,
                waiting=event.waiting,
            )
        )


class DecisionWatch:
    """Records the decisions of a core's next steps on request. Called in the engine's thread,
    between steps."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._log = DecisionLog()
        self.is_noting = False
        self._asked = -math.inf

    def ask(self) -> Decisions:
        """Return the known decisions, and start recording newer ones."""
        now = time.monotonic()
        if now - self._asked >= REST_S:
            self._asked = now
            self._log.left = NOTED_STEPS
            if not self.is_noting:
                self.is_noting = True
                self._core.observers.add("of the page", self._log)
        return Decisions(self._core.settings.scheduler_name, tuple(self._log.steps))

    def rest(self) -> None:
        """Stop recording once enough steps are recorded."""
        if self.is_noting and self._log.left <= 0:
            self.is_noting = False
            self._core.observers.remove(self._log)
