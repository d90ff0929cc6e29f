"""Last come, first served: the stack among the queueing disciplines."""

from dovetail.api.scheduler import Claims, Scheduler, Step


class LCFS(Scheduler):
    """Those that run go on, the newest first; then the newest of those that wait are admitted. When
    memory lacks for those that run, the oldest make room. A newcomer takes nobody's memory:
    measured by its conformance suite, that computes more tokens twice than once."""

    claims = Claims(starves=True)

    def schedule(self, step: Step) -> None:
        for request in step.grant_each(reversed(step.running)):
            # the oldest first, and none that is newer than the request
            step.grant(request, evict=step.running)
        for request in reversed(step.waiting):
            if not step.grant(request):
                break
