"""First come, first served: continuous batching (Orca, OSDI '22) with chunked prefills
(Sarathi-Serve, OSDI '24)."""

from __future__ import annotations

from dovetail.api.scheduler import Scheduler, SchedulerCapabilities, Step


class FCFS(Scheduler):
    """Serves decodes, then prefills in progress, then new requests, each by arrival.

    A running request that lacks memory preempts the youngest ones. Once any request is refused, no
    later one is served: small requests must not overtake a large one."""

    capabilities = SchedulerCapabilities(order="arrival")

    def schedule(self, step: Step) -> None:
        running = step.running
        decoding = step.decoding
        needy = set(step.grant_each(decoding))  # decodes that lack memory
        if needy or len(running) > len(decoding):
            for (
                request
            ) in running:  # by arrival: an older prefill may need the memory of a younger decode
                if (request in needy or request.prefill_left) and not step.grant(
                    request, evict=reversed(step.running)
                ):
                    return
        for request in step.waiting:
            if not step.grant(request):
                return
