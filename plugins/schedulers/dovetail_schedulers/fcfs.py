"""First come, first served, with continuous batching (Orca, OSDI '22) and chunked prefills among the decodes (Sarathi-Serve, OSDI '24)."""

from __future__ import annotations

from pydantic import BaseModel, Field

from dovetail.api.scheduler import Claims, Scheduler, SchedulerContext, Step
from dovetail_schedulers.in_order import run_on
from dovetail_schedulers.stretch import prefill_within


class FCFSOptions(BaseModel, extra="forbid", frozen=True):
    """Options of the scheduler `fcfs`."""

    max_stretch: float | None = Field(
        2.0,
        gt=1,
        allow_inf_nan=False,
        description="How many times longer prompts may make a step, by estimate, while answers are streamed; null: up to the token budget.",
    )


class FCFS(Scheduler):
    """A policy that serves all decodes, then prompts that have begun, then new ones. If memory is short, the youngest requests are preempted; an
    older one never makes room for a younger."""

    claims = Claims(order="arrival", idles=True)
    options: FCFSOptions

    def __init__(self, options: FCFSOptions, context: SchedulerContext) -> None:
        super().__init__(options, context)
        if options.max_stretch is None:
            self.claims = Claims(order="arrival")

    def schedule(self, step: Step) -> None:
        running, decoding = step.running, step.decoding
        begun = [request for request in running if request.prefill_left] if len(running) > len(decoding) else []
        run_on(step, decoding)
        left = step.tokens_left
        if self.options.max_stretch is not None and left and (begun or step.waiting):
            left = prefill_within(step, self.options.max_stretch, left)
        for request in (*begun, *step.waiting):
            grant = step.grant(request, left, evict=reversed(step.running) if request in begun else ())
            if not grant:
                break
            left -= grant.tokens
