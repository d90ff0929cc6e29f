"""Shortest job first, by predicted length: Qiu et al., Efficient Interactive LLM Serving with Proxy
Model-based Sequence Length Prediction (arXiv:2404.08509), called SSJF there; the rule is Smith's
(Naval Research Logistics Quarterly, 1956)."""

from __future__ import annotations

from dovetail.api.scheduler import Refusal, Scheduler, SchedulerCapabilities, Step
from dovetail_schedulers.lengths import expected_tokens


class SJF(Scheduler):
    """Admits the shortest answer first, ties by arrival. Admitted requests keep running; if memory
    is short, the longest are preempted.

    The length is `Request.predicted_tokens`, otherwise `max_tokens`.
    """

    capabilities = SchedulerCapabilities(starves=True)

    def schedule(self, step: Step) -> None:
        by_length = sorted(step.running, key=expected_tokens)
        for request in step.grant_each(by_length):
            step.grant(request, evict=reversed(by_length))
        for request in sorted(step.waiting, key=expected_tokens):
            if step.grant(request).refused not in (None, Refusal.NOT_NOW):
                break
