"""vLLM's scheduler (v1, 0.19) as a policy: order, preemption and admission. Used by
`vllm_measured.py`.

Requests that run come first, in the order in which they were admitted, decodes and chunks of
prompts alike. Whoever lacks a block takes those of the request that was admitted last, until that
is itself. Then waiting requests are admitted in turn, those that were preempted before all others,
unless somebody was preempted in this very step; and only if the pool has room for all tokens that a
request has (`scheduler_reserve_full_isl`).
"""

from __future__ import annotations

from bench.lab.policies import component, registry_with
from dovetail.api.scheduler import Scheduler, Step
from dovetail.registry.registry import Registry

NAME = "vllm"


class VLLMScheduler(Scheduler):
    """First come, first served, as vLLM does it."""

    def schedule(self, step: Step) -> None:
        running = len(step.running)
        for request in step.grant_each(step.running):
            if (
                request in step.running
                and not step.grant(request, evict=reversed(step.running))
                and step.tokens_left
            ):
                step.preempt(request)
        if len(step.running) < running:
            return
        for request in step.waiting:
            if not step.grant(request, reserve=True):
                break


def registry() -> Registry:
    """Return the installed plugins, and this policy among them."""
    return registry_with(component("scheduler", NAME, "bench.lab.vllm_scheduling:VLLMScheduler"))
