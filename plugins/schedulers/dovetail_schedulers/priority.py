"""Most important request first, with aging: waiting makes a request more important (Silberschatz et
al., Operating System Concepts)."""

from __future__ import annotations

import math
from operator import attrgetter

from pydantic import BaseModel, Field

from dovetail.api.scheduler import Scheduler, SchedulerCapabilities, SchedulerContext, Step
from dovetail_schedulers.in_order import grant_in_order


class PriorityOptions(BaseModel, extra="forbid", frozen=True):
    """Options of the scheduler `priority`."""

    aging_s: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Seconds of waiting worth one level of priority, so that no request starves; "
        "null: no aging.",
    )


class Priority(Scheduler):
    """Serves smaller `request.priority` first, then by arrival. All requests age at the same rate,
    so their order is fixed: no two evict each other in turns."""

    capabilities = SchedulerCapabilities(order="priority", starves=True)
    options: PriorityOptions

    def __init__(self, options: PriorityOptions, context: SchedulerContext) -> None:
        super().__init__(options, context)
        if options.aging_s is not None:
            self.capabilities = SchedulerCapabilities()

    def schedule(self, step: Step) -> None:
        order = sorted((*step.running, *step.waiting), key=attrgetter("arrival_time"))
        # all age at the same rate, so only arrival matters
        aging_s = self.options.aging_s or math.inf
        order.sort(key=lambda request: request.priority + request.arrival_time / aging_s)
        grant_in_order(step, order, lambda request: reversed(order))
