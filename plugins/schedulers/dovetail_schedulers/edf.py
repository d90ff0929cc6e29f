"""Earliest deadline first (Liu and Layland, JACM 1973), with those that can't be met turned away, as in Clockwork (OSDI '20)."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from dovetail.api.scheduler import Claims, Context, Scheduler, Step, StepDone
from dovetail.request import Request
from dovetail_schedulers.in_order import grant_in_order


class EDFOptions(BaseModel):
    """Options of the scheduler `edf`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    assume: Literal["shortest", "longest"] = Field(
        "shortest", description="Length of an answer that nobody predicted: one more token, so that only the surely late are rejected, or max_tokens."
    )
    warmup_steps: int = Field(20, ge=0, description="Steps to finish before step times are trusted; till then only what is late is rejected.")


class EDF(Scheduler):
    """Requests without a deadline come last, by arrival. A deadline is hopeless if its request couldn't meet it even alone on the device."""

    claims = Claims(order="deadline", starves=True, rejects=True)
    options: EDFOptions

    def __init__(self, options: EDFOptions, context: Context) -> None:
        super().__init__(options, context)
        self._steps = 0

    def schedule(self, step: Step) -> None:
        order = sorted((*step.running, *step.waiting), key=lambda request: request.arrival_time)
        order.sort(key=lambda request: math.inf if request.deadline is None else request.deadline)
        decode_s = step.estimate_s(decodes=1)
        hopeless = [r for r in order if r.deadline is not None and step.now + self._shortest_s(step, r, decode_s) > r.deadline]
        for request in hopeless:
            step.reject(request, f"its deadline at {request.deadline:.3f} s can't be met any more at {step.now:.3f} s")
        gone = set(hopeless)
        order = [request for request in order if request not in gone]
        grant_in_order(step, order, lambda request: reversed(order))

    def on_step(self, done: StepDone) -> None:
        self._steps += 1

    def _shortest_s(self, step: Step, request: Request, decode_s: float) -> float:
        """Seconds until its last token, if nothing else ran."""
        if self._steps < self.options.warmup_steps:
            return 0.0
        length = request.predicted_tokens or (request.max_tokens if self.options.assume == "longest" else 0)
        left = min(request.output_left, max(1, length - (request.max_tokens - request.output_left)))
        prefill = step.cost(request).tokens if request.prefill_left else 0
        return step.estimate_s(prefill_tokens=prefill) + (left - 1) * decode_s if prefill else left * decode_s
