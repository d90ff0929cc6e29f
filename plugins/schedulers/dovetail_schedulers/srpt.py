"""Shortest remaining time first (Schrage, Operations Research, 1968) by predicted length, with the
limited preemption of Shahout et al., Don't Stop Me Now: Embedding Based Scheduling for LLMs (TRAIL,
ICLR '25, arXiv:2410.01035)."""

from __future__ import annotations

from pydantic import BaseModel, Field

from dovetail.api.scheduler import Scheduler, SchedulerCapabilities, Step
from dovetail.request import Request
from dovetail_schedulers.in_order import grant_in_order
from dovetail_schedulers.lengths import expected_tokens, generated_tokens


class SRPTOptions(BaseModel, extra="forbid", frozen=True):
    """Options of the scheduler `srpt`."""

    preempt_until: float = Field(
        0.8,
        ge=0,
        le=1,
        description="Share of the expected answer after which a request precedes all others, since "
        "it holds many pages by then.",
    )


class SRPT(Scheduler):
    """Serves the request with the fewest tokens left to generate first, ties by arrival; the last
    are preempted if memory is short.

    The length is `Request.predicted_tokens`, otherwise `max_tokens`. Waiting requests keep their
    rank and running ones only rise, so no two evict each other in turns.
    """

    capabilities = SchedulerCapabilities(starves=True)
    options: SRPTOptions

    def schedule(self, step: Step) -> None:
        running = set(step.running)

        def rank(request: Request) -> int:
            expected, generated = expected_tokens(request), generated_tokens(request)
            finishing = request in running and generated >= max(
                1, self.options.preempt_until * expected
            )
            return 0 if finishing else expected - generated

        order = sorted((*step.running, *step.waiting), key=lambda request: request.arrival_time)
        order.sort(key=rank)
        grant_in_order(step, order, lambda request: reversed(order))
