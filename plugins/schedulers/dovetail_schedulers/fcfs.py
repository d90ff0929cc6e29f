"""First come, first served, with continuous batching (Orca, OSDI '22) and chunked prefills among the decodes (Sarathi-Serve, OSDI '24)."""

from __future__ import annotations

from dovetail.api.scheduler import Claims, Scheduler, Step
from dovetail_schedulers.in_order import run_on


class FCFS(Scheduler):
    """A policy that serves all decodes, then prompts that have begun, then new ones. If memory is short, the youngest requests are preempted; an
    older one never makes room for a younger."""

    claims = Claims(order="arrival")

    def schedule(self, step: Step) -> None:
        running, decoding = step.running, step.decoding
        begun = [request for request in running if request.prefill_left] if len(running) > len(decoding) else []
        run_on(step, decoding)
        for request in (*begun, *step.waiting):
            if not step.grant(request, evict=reversed(step.running) if request in begun else ()):
                break
