"""Longest prefix match first: cache-aware admission as in SGLang (Zheng et al., arXiv:2312.07104,
section 3)."""

from __future__ import annotations

import math

from pydantic import BaseModel, Field

from dovetail.api.scheduler import Refusal, Scheduler, Step
from dovetail.request import Request
from dovetail_schedulers.in_order import run_on


class LPMOptions(BaseModel, extra="forbid", frozen=True):
    """Options of the scheduler `lpm`."""

    window: int = Field(
        128, ge=1, description="Number of waiting requests, by arrival, to look up in each step."
    )
    patience_s: float = Field(
        10.0,
        ge=0,
        description="Seconds after which waiting requests go first, by arrival, regardless of the "
        "cache.",
    )


class LPM(Scheduler):
    """Admits the waiting requests with the longest cached prefix first, before it is evicted.
    Admitted requests keep running; if memory is short, the youngest are preempted."""

    options: LPMOptions

    def schedule(self, step: Step) -> None:
        run_on(step, step.running)
        if not (step.tokens_left and step.seqs_left and step.free_pages):
            return

        def rank(request: Request) -> float:
            impatient = step.now - request.arrival_time >= self.options.patience_s
            return -math.inf if impatient else -step.cost(request).cached

        for request in sorted(step.waiting[: self.options.window], key=rank):  # ties by arrival
            if step.grant(request).refused not in (None, Refusal.NOT_NOW):
                break
