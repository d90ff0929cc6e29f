"""Earliest deadline first (Liu and Layland, JACM 1973); requests whose deadline can't be met are
rejected, as in Clockwork (OSDI '20)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, Field

from dovetail.api.scheduler import Scheduler, SchedulerCapabilities, Step
from dovetail.request import Request
from dovetail_schedulers.in_order import grant_in_order


class EDFOptions(BaseModel, extra="forbid", frozen=True):
    """Options of the scheduler `edf`."""

    assume: Literal["shortest", "longest"] = Field(
        "shortest",
        description="Output length if there is no prediction: one more token, so that only "
        "requests certain to be late are rejected; or max_tokens.",
    )
    warmup_steps: int = Field(
        20,
        ge=0,
        description="Number of steps before estimates are trusted; until then only late requests "
        "are rejected.",
    )


class EDF(Scheduler):
    """Earliest deadline first. Requests without a deadline come last, by arrival. A request is
    hopeless if it would miss its deadline even on an otherwise idle device."""

    capabilities = SchedulerCapabilities(order="deadline", starves=True, rejects=True)
    options: EDFOptions

    def schedule(self, step: Step) -> None:
        order = sorted((*step.running, *step.waiting), key=lambda request: request.arrival_time)
        order.sort(key=lambda request: math.inf if request.deadline is None else request.deadline)
        hopeless = dict.fromkeys(self._hopeless(step, order))
        for request in hopeless:
            step.reject(
                request,
                f"its deadline at {request.deadline:.3f} s can no longer be met at {step.now:.3f} s",
            )
        order = [request for request in order if request not in hopeless]
        grant_in_order(step, order, lambda request: reversed(order))

    def _hopeless(self, step: Step, order: Sequence[Request]) -> list[Request]:
        """Return the requests that would be late even on an otherwise idle device."""
        trusted = step.index >= self.options.warmup_steps
        decode_s = step.estimate_s(decodes=1) if trusted else 0.0
        # per token
        prefill_s = (
            step.estimate_s(prefill_tokens=self.context.token_budget) / self.context.token_budget
            if trusted
            else 0.0
        )

        def late(request: Request, deadline: float) -> bool:
            if (
                deadline
                > step.now
                + (request.prompt_tokens + request.max_tokens) * prefill_s
                + request.max_tokens * decode_s
            ):
                return False  # fast path: most are far from late
            length = request.predicted_tokens or (
                request.max_tokens if self.options.assume == "longest" else 0
            )
            left = min(
                request.output_left, max(1, length - (request.max_tokens - request.output_left))
            )
            prefill = step.cost(request).tokens if request.prefill_left else 0
            return step.now + prefill * prefill_s + (left - bool(prefill)) * decode_s > deadline

        return [
            request
            for request in order
            if request.deadline is not None and late(request, request.deadline)
        ]
