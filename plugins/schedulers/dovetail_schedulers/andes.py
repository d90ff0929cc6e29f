"""Serves answers at reading speed: Liu et al., Andes: Defining and Enhancing Quality-of-Experience
in LLM-Based Text Streaming Services (arXiv:2404.16283)."""

from __future__ import annotations

from pydantic import BaseModel, Field, PositiveFloat

from dovetail.api.scheduler import (
    Refusal,
    Scheduler,
    SchedulerCapabilities,
    SchedulerContext,
    Step,
    StepDone,
)
from dovetail.request import Request
from dovetail_schedulers.in_order import run_on


class AndesOptions(BaseModel, extra="forbid", frozen=True):
    """Options of the scheduler `andes`. The first two define the paper's quality of experience."""

    ttft_s: float = Field(
        1.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds after arrival by which a reader expects the first token.",
    )
    tokens_per_s: PositiveFloat = Field(
        4.8, description="Reading speed: faster tokens don't improve the quality of experience."
    )
    ahead_s: float = Field(
        2.0,
        ge=0,
        description="A request this far ahead of its reader pauses while others wait; one due "
        "sooner than this is urgent.",
    )
    max_preemptions: int = Field(
        1, ge=0, description="Number of preemptions after which a request is never paused again."
    )


class Andes(Scheduler):
    """Policy in which a request is due when its reader will have read all its tokens. While others
    wait, requests far ahead of their readers pause, and lose their pages, furthest ahead first, to
    requests that are due soon. Otherwise like `fcfs`, with waiting requests in the order in which
    they are due.

    The paper weighs the gain of each request by its context; here a pause always gains, and the
    limit on preemptions is per request.
    """

    capabilities = SchedulerCapabilities(starves=True, idles=True)
    options: AndesOptions

    def __init__(self, options: AndesOptions, context: SchedulerContext) -> None:
        super().__init__(options, context)
        self._read_until: dict[Request, float] = {}

    def schedule(self, step: Step) -> None:
        budget = step.tokens_left
        soon = step.now + self.options.ahead_s
        ahead = [
            request
            for request in step.decoding
            if self._due(request) >= soon and request.preemptions < self.options.max_preemptions
        ]
        ahead = sorted(ahead, key=self._due, reverse=True) if step.waiting else []
        paused = set(ahead)
        for request in step.grant_each(
            [request for request in step.running if request not in paused]
        ):
            step.grant(request, evict=(*ahead, *reversed(step.running)))
        for request in sorted(step.waiting, key=self._due):
            if step.grant(
                request, evict=ahead if self._due(request) < soon else ()
            ).refused not in (None, Refusal.NOT_NOW):
                break
        if not step.waiting or step.tokens_left == budget:  # no request gains from a pause
            run_on(step, [request for request in step.running if request in paused])

    def _due(self, request: Request) -> float:
        return self._read_until.get(request, request.arrival_time + self.options.ttft_s)

    def on_step(self, done: StepDone) -> None:
        for ran in done.ran:
            if ran.generated:
                begins = max(self._read_until.get(ran.request, done.ended), done.ended)
                self._read_until[ran.request] = begins + ran.generated / self.options.tokens_per_s

    def on_finished(self, request: Request) -> None:
        self._read_until.pop(request, None)
