"""A limit of requests a minute for each client: the baseline RPM of Fairness in Serving Large Language Models (OSDI '24, arXiv:2401.00588)."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from typing import Literal

from pydantic import BaseModel, Field

from dovetail.api.scheduler import Claims, Refusal, Scheduler, SchedulerContext, Step
from dovetail.request import Request
from dovetail_schedulers.in_order import run_on

LOOK_AFTER = 64  # at least this many requests are let in between two rounds of forgetting


class RPMOptions(BaseModel, extra="forbid", frozen=True):
    """Options of the scheduler `rpm`. Requests without a client count as those of one more client."""

    limit: int = Field(60, ge=1, description="Number of a client's requests admitted in any window.")
    window_s: float = Field(60.0, gt=0, allow_inf_nan=False, description="Length of the window in seconds.")
    over: Literal["reject", "defer"] = Field("reject", description="Requests above the limit are rejected, or wait until there is room.")


class RPM(Scheduler):
    """A policy that serves the requests it has let in first come, first served; if memory is short, the youngest are preempted.

    From time to time clients are forgotten whose requests are out of every window that may still matter, which changes no decision: times are
    kept for the clients let in during the last two windows, for at most as many others, and some `LOOK_AFTER`.
    """

    claims = Claims(order="arrival", rejects=True)
    options: RPMOptions

    def __init__(self, options: RPMOptions, context: SchedulerContext) -> None:
        super().__init__(options, context)
        if options.over == "defer":
            self.claims = Claims(idles=True, starves=True)
        self._let_in: set[Request] = set()
        self._ends: dict[str | None, list[float]] = {}  # client -> times at which its requests let in stop counting, in order
        self._planned = -math.inf  # when a step was planned last: later requests arrive later, unless dated back
        self._look_after = LOOK_AFTER  # requests still to let in before clients are forgotten again

    def schedule(self, step: Step) -> None:
        waiting = step.waiting
        all_ran = run_on(step, step.running)
        crowded = not all_ran or len(step.waiting) > len(waiting)  # one that lacks memory, or was preempted, comes first
        for request in [request for request in waiting if request in self._let_in or self._lets_in(step, request)]:
            if crowded or step.grant(request).refused not in (None, Refusal.NOT_NOW):
                break
        self._planned = step.now

    def _lets_in(self, step: Step, request: Request) -> bool:
        """Return True, and count the request, if its client is below the limit in a window that ends at its arrival, or now if it may be deferred."""
        defer, window_s = self.options.over == "defer", self.options.window_s
        earliest = step.now if defer else self._planned - window_s  # no window ends before, even if a request is dated back so far
        time, ends = max(request.arrival_time, earliest), self._ends.setdefault(request.client, [])
        del ends[: bisect_right(ends, earliest)]
        if len(ends) - bisect_right(ends, time) < self.options.limit:
            insort(ends, time + window_s)
            self._let_in.add(request)
            self._forget_before(earliest)
            return True
        if defer:
            step.wake_at(ends[0])
            step.note(request, f"its client {request.client!r} is over its limit until {ends[0]:.3f} s")
        else:
            step.reject(request, f"its client {request.client!r} sent more than {self.options.limit} requests in {window_s:g} s")
        return False

    def _forget_before(self, earliest: float) -> None:
        """Forget clients; called for each request let in. It looks so rarely that the cost per request doesn't grow with the number of clients."""
        self._look_after -= 1
        if self._look_after <= 0:
            self._ends = {client: ends for client, ends in self._ends.items() if ends[-1] > earliest}
            self._look_after = max(LOOK_AFTER, len(self._ends))

    def on_finished(self, request: Request) -> None:
        self._let_in.discard(request)
