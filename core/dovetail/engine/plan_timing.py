"""`PlanTiming`: it decides when the core plans its next step while one is running, and how it waits. It holds the core's settings that front ends and
simulations may change."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from dovetail.api.clock import Clock, VirtualClock
from dovetail.api.executor import Result
from dovetail.engine.estimator import StepTimeFit
from dovetail.engine.flight import Flight

LATE_SHARE = 0.7  # plan at this share of the running step's estimated time


class PlanTiming:
    """The time of planning: as late as the device allows while more requests may come, so that one that arrives during a step isn't a whole step
    late."""

    def __init__(self, clock: Clock) -> None:
        self.wait_until: Callable[[float], None] = clock.wait_until  # how the core sleeps; an asynchronous front end can interrupt its own
        self.expects_arrivals = False  # more requests may come than the core knows of, so that planning late pays
        self.plans_late = True  # False: plan as soon as another step fits in flight, as other engines do
        self.virtual_plan_s = 0.0  # seconds that planning takes on a virtual clock
        self._clock = clock
        self._plan_s = 0.0  # a running mean of the time from planning to the end of submitting
        self.last_ended = -math.inf  # when the device ended the newest collected step
        self._last_durations = (0.0, 0.0)  # seconds on the device of the last two steps

    def planned(self, seconds: float) -> None:
        """Take note of how long planning and submitting a step took."""
        self._plan_s += 0.1 * (seconds - self._plan_s)

    def collected(self, result: Result) -> None:
        """Take note of how long the device took for a step."""
        self.last_ended = result.ended
        self._last_durations = (self._last_durations[1], result.ended - result.started)

    def flights_end(self, flights: Sequence[Flight], fit: StepTimeFit) -> float:
        """Return when `flights`, the steps on the device in order, will have ended by the estimate of `fit`."""
        end = self.last_ended
        for flight in flights:
            end = max(end, flight.planned) + fit.estimate_s(flight.prefill_tokens, flight.decode_tokens, flight.context_tokens)
        return end

    def wait_until_due(self, flight: Flight, arrival: float, fit: StepTimeFit) -> None:
        """Wait until the next step should be planned. `flight` is the newest step on the device, `arrival` the time of the next known arrival, or
        infinity."""
        if not self.plans_late or (arrival == math.inf and not self.expects_arrivals):
            return
        estimate_s = fit.estimate_s(flight.prefill_tokens, flight.decode_tokens, flight.context_tokens)
        duration = min(estimate_s, *self._last_durations)  # an estimate that one slow step has spoilt must not keep the device idle
        started = max(self.last_ended, flight.planned)
        plan_s = self.virtual_plan_s if isinstance(self._clock, VirtualClock) else self._plan_s
        due = started + min(LATE_SHARE * duration, duration - 3 * plan_s)
        if arrival > due and not self.expects_arrivals:
            return
        if due > self._clock.now():
            self.wait_until(due)
