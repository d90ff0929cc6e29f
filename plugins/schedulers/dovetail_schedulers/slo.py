"""Latency objectives: a deadline for the first token, and a bound on inter-token latency. Requests
that would miss the first are rejected early, as in Mooncake (Qin et al., FAST '25,
arXiv:2407.00079); the second caps the prompt tokens of a step, as in Sarathi-Serve (OSDI '24)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import BaseModel, Field, PositiveFloat

from dovetail.api.scheduler import Refusal, Scheduler, SchedulerCapabilities, SchedulerContext, Step
from dovetail.request import Request
from dovetail_schedulers.in_order import run_on

LEAST = 256  # prompt tokens per step, so that prompts make progress however tight the bound is


class SLOOptions(BaseModel, extra="forbid", frozen=True):
    """Options of the scheduler `slo`. The first two are defaults for requests without
    `ttft_deadline` and `tbt_s`; null: no objective."""

    ttft_s: PositiveFloat | None = Field(
        2.0, description="Seconds after arrival by which the first token is due."
    )
    tbt_s: PositiveFloat | None = Field(0.1, description="Maximum seconds between two tokens.")
    late: Literal["reject", "last"] = Field(
        "reject",
        description="Reject requests that would miss their first token's deadline, or serve them "
        "last.",
    )


class SLO(Scheduler):
    """Serves all decodes, then prompts by the deadline of their first token, with as many tokens as
    the tightest bound on inter-token latency allows. If memory is short, the youngest are
    preempted. While `Step.fit` is uncertain, steps get few prompt tokens, and only requests whose
    deadline has passed count as late."""

    capabilities = SchedulerCapabilities(
        idles=True, starves=True, rejects=True, prefill_limited=False
    )
    options: SLOOptions

    def __init__(self, options: SLOOptions, context: SchedulerContext) -> None:
        super().__init__(options, context)
        self.capabilities = SchedulerCapabilities(
            idles=True, starves=True, rejects=options.late == "reject", prefill_limited=False
        )
        # prompt tokens to compute, as of when the request was first seen
        self._uncached: dict[Request, int] = {}

    def schedule(self, step: Step) -> None:
        run_on(step, step.decoding)
        begun = [request for request in step.running if request.prefill_left]
        sure = 1.0 - min(1.0, step.fit.error)
        tokens, token_s = self._prompt_tokens(step, sure)
        order = sorted((*begun, *step.waiting), key=self._due)
        late = dict.fromkeys(self._late(step, order, token_s, sure))
        admits = True
        for request in late if self.options.late == "reject" else ():
            step.reject(
                request,
                f"its first token would be late: it is due in {self._due(request) - step.now:.3f} s",
            )
        for request in sorted(order, key=late.__contains__):
            if admits or request in begun:
                grant = step.grant(
                    request,
                    tokens,
                    reserve=True,
                    evict=reversed(step.running) if request in begun else (),
                )
                tokens = tokens - grant.tokens
                admits = admits and grant.refused in (None, Refusal.NOT_NOW)

    def _prompt_tokens(self, step: Step, sure: float) -> tuple[int, float]:
        """Return the number of prompt tokens that this step may compute besides the decodes, and
        the seconds per token if all steps are like it."""
        decoding = step.decoding
        budget = max(1, step.tokens_left)
        context = sum(request.num_tokens for request in step.decoding)
        alone_s = step.estimate_s(0, len(decoding), context)
        token_s = max(
            1e-9, (step.estimate_s(budget, len(decoding), context + budget) - alone_s) / budget
        )
        bound_s = min(
            filter(None, (request.tbt_s or self.options.tbt_s for request in decoding)),
            default=None,
        )
        tokens = (
            budget
            if bound_s is None
            else int(min(budget, max(LEAST, (sure * bound_s - alone_s) / token_s)))
        )
        return tokens, token_s + alone_s / tokens

    def _late(
        self, step: Step, order: Sequence[Request], token_s: float, sure: float
    ) -> Iterator[Request]:
        """Yield the requests whose first token is expected too late, after the steps in flight and
        all earlier prompts that aren't late themselves."""
        ready_s = step.in_flight_until - step.now
        for request in order:
            tokens = self._uncached.get(request) or self._uncached.setdefault(
                request, step.cost(request).tokens
            )
            seconds = token_s * min(request.prefill_left, tokens)
            begun = request.num_computed or request.output_left < request.max_tokens
            if not begun and step.now + sure * (ready_s + seconds) > self._due(request):
                yield request
            else:
                ready_s += seconds

    def _due(self, request: Request) -> float:
        return (
            request.arrival_time + (self.options.ttft_s or math.inf)
            if request.ttft_deadline is None
            else request.ttft_deadline
        )

    def on_finished(self, request: Request) -> None:
        self._uncached.pop(request, None)
