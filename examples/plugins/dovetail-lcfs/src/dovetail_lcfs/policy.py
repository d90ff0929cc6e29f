"""Last come, first served: the stack among the queueing disciplines."""

from dovetail.api.scheduler import Scheduler, SchedulerCapabilities, Step


class LCFS(Scheduler):
    """Last come, first served.

    Running requests are granted first, newest first; then waiting requests are admitted, newest
    first. If memory is short, the oldest running requests are preempted, but never to admit a
    waiting one: in the conformance suite, that recomputed more tokens than it computed.
    """

    capabilities = SchedulerCapabilities(starves=True)

    def schedule(self, step: Step) -> None:
        for request in step.grant_each(reversed(step.running)):
            # the oldest first, and none that is newer than the request
            step.grant(request, evict=step.running)
        for request in reversed(step.waiting):
            if not step.grant(request):
                break
