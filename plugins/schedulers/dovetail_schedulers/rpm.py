"""A limit of requests a minute for each client, as public services have it: the baseline RPM of Sheng et al., Fairness in Serving Large Language
Models (OSDI '24, arXiv:2401.00588), section 5."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Literal

from pydantic import BaseModel, Field

from dovetail.api.scheduler import Claims, Context, Refusal, Scheduler, Step
from dovetail.request import Request
from dovetail_schedulers.in_order import run_on


class RPMOptions(BaseModel, extra="forbid", frozen=True):
    """Options of the scheduler `rpm`. Requests that name no client count as those of one more."""

    limit: int = Field(60, ge=1, description="Requests of a client that are let in during any window.")
    window_s: float = Field(60.0, gt=0, allow_inf_nan=False, description="Length of the window in seconds.")
    over: Literal["reject", "defer"] = Field("reject", description="What becomes of those above the limit: rejected, or kept until there is room.")


class RPM(Scheduler):
    """First come, first served, among those that were let in; when memory lacks, the youngest make room."""

    claims = Claims(order="arrival", rejects=True)
    options: RPMOptions

    def __init__(self, options: RPMOptions, context: Context) -> None:
        super().__init__(options, context)
        if options.over == "defer":
            self.claims = Claims(idles=True, starves=True)
        self._let_in: set[Request] = set()
        self._times: defaultdict[str | None, deque[float]] = defaultdict(deque)  # client -> when its last ones were let in

    def schedule(self, step: Step) -> None:
        waiting = step.waiting
        run_on(step, step.running)
        crowded = len(step.waiting) > len(waiting)  # somebody was preempted, and comes first
        for request in [request for request in waiting if request in self._let_in or self._lets_in(step, request)]:
            if crowded or step.grant(request).refused not in (None, Refusal.NOT_NOW):
                break

    def _lets_in(self, step: Step, request: Request) -> bool:
        """Whether its client is below the limit; then it counts. A window ends at the arrival, or, for who was deferred, now."""
        defer = self.options.over == "defer"
        time, times = step.now if defer else request.arrival_time, self._times[request.client]
        while times and times[0] + self.options.window_s <= time:
            times.popleft()
        if len(times) < self.options.limit:
            times.append(time)
            self._let_in.add(request)
            return True
        if defer:
            step.wake_at(times[0] + self.options.window_s)
        else:
            step.reject(request, f"its client {request.client!r} sent more than {self.options.limit} requests in {self.options.window_s:g} s")
        return False

    def on_finished(self, request: Request) -> None:
        self._let_in.discard(request)
