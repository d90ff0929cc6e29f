"""First come, first served, with continuous batching (Orca, OSDI '22) and chunked prefills among the decodes (Sarathi-Serve, OSDI '24)."""

from __future__ import annotations

from dovetail.api.scheduler import Claims, Scheduler, Step


class FCFS(Scheduler):
    claims = Claims(order="arrival")

    def schedule(self, step: Step) -> None:
        for request in step.grant_each(step.running):  # those that didn't fit:
            step.grant(request, evict=reversed(step.running))  # the youngest make room, never an older one
        for request in step.waiting:
            if not step.grant(request):
                break
