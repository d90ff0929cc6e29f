"""Limits requests per minute and client: the baseline RPM of Fairness in Serving Large Language
Models (OSDI '24, arXiv:2401.00588)."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from typing import Literal

from pydantic import BaseModel, Field

from dovetail.api.scheduler import Refusal, Scheduler, SchedulerCapabilities, SchedulerContext, Step
from dovetail.request import Request
from dovetail_schedulers.in_order import run_on

LOOK_AFTER = 64  # least number of requests accepted between two cleanups


class RPMOptions(BaseModel, extra="forbid", frozen=True):
    """Options of the scheduler `rpm`. Requests without a client count as one more client."""

    limit: int = Field(
        60, ge=1, description="Number of requests of a client accepted in any window."
    )
    window_s: float = Field(
        60.0, gt=0, allow_inf_nan=False, description="Length of the window in seconds."
    )
    over: Literal["reject", "defer"] = Field(
        "reject", description="Reject requests above the limit, or defer them until they fit."
    )


class RPM(Scheduler):
    """Serves accepted requests first come, first served; if memory is short, the youngest are
    preempted.

    Clients are forgotten occasionally, once their requests are outside of every window that may
    still matter, which changes no decision: times are kept for the clients accepted during the last
    two windows, for at most as many others, and some `LOOK_AFTER`.
    """

    capabilities = SchedulerCapabilities(order="arrival", rejects=True)
    options: RPMOptions

    def __init__(self, options: RPMOptions, context: SchedulerContext) -> None:
        super().__init__(options, context)
        if options.over == "defer":
            self.capabilities = SchedulerCapabilities(idles=True, starves=True)
        self._let_in: set[Request] = set()
        # client -> times at which its accepted requests stop counting, ascending
        self._ends: dict[str | None, list[float]] = {}
        # time of the last planning: later requests arrive later, unless backdated
        self._planned = -math.inf
        self._look_after = LOOK_AFTER  # requests still to accept before the next cleanup

    def schedule(self, step: Step) -> None:
        waiting = step.waiting
        all_ran = run_on(step, step.running)
        # requests that lack memory or were preempted go first
        crowded = not all_ran or len(step.waiting) > len(waiting)
        for request in [
            request
            for request in waiting
            if request in self._let_in or self._lets_in(step, request)
        ]:
            if crowded or step.grant(request).refused not in (None, Refusal.NOT_NOW):
                break
        self._planned = step.now

    def _lets_in(self, step: Step, request: Request) -> bool:
        """Return True, and count the request, if its client is below the limit in the window that
        ends at its arrival (with `over: defer`, now)."""
        defer = self.options.over == "defer"
        window_s = self.options.window_s
        # no window ends earlier, even for a request backdated that far
        earliest = step.now if defer else self._planned - window_s
        time = max(request.arrival_time, earliest)
        ends = self._ends.setdefault(request.client, [])
        del ends[: bisect_right(ends, earliest)]
        if len(ends) - bisect_right(ends, time) < self.options.limit:
            insort(ends, time + window_s)
            self._let_in.add(request)
            self._forget_before(earliest)
            return True
        if defer:
            step.wake_at(ends[0])
            step.note(
                request, f"its client {request.client!r} is over its limit until {ends[0]:.3f} s"
            )
        else:
            step.reject(
                request,
                f"its client {request.client!r} sent more than {self.options.limit} requests in "
                f"{window_s:g} s",
            )
        return False

    def _forget_before(self, earliest: float) -> None:
        """Forget clients; called for each accepted request. Runs so rarely that the cost per
        request doesn't grow with the number of clients."""
        self._look_after -= 1
        if self._look_after <= 0:
            self._ends = {
                client: ends for client, ends in self._ends.items() if ends[-1] > earliest
            }
            self._look_after = max(LOOK_AFTER, len(self._ends))

    def on_finished(self, request: Request) -> None:
        self._let_in.discard(request)
