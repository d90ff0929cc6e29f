"""First come, first served: continuous batching (Orca, OSDI '22) with chunked prefills (Sarathi-Serve, OSDI '24)."""

from __future__ import annotations

from dovetail.api.scheduler import Claims, Scheduler, Step


class FCFS(Scheduler):
    """Serves decodes, then prefills in progress, then new requests, each by arrival.

    A running request that lacks memory preempts the youngest ones. Once any request is refused, no later one is served: small requests must not
    overtake a large one."""

    claims = Claims(order="arrival")

    def schedule(self, step: Step) -> None:
        running, decoding = step.running, step.decoding
        prefilling = [request for request in running if request.prefill_left] if len(running) > len(decoding) else []
        for request in (*step.grant_each(decoding), *prefilling):  # `grant_each` returns the decodes that lack memory
            if not step.grant(request, evict=reversed(step.running)):
                return
        for request in step.waiting:
            if not step.grant(request):
                return
