"""k-LPM as a policy (Dexter et al., NeurIPS '25, arXiv:2502.04677, algorithm 1): the request that
waits longest, then k - 1 by the longest cached prefix, again and again. Used by
`paper_results.py`."""

from __future__ import annotations

from pydantic import BaseModel, Field

from bench.lab.policies import component, registry_with
from dovetail.api.scheduler import Refusal, Scheduler, SchedulerContext, Step
from dovetail.registry.registry import Registry
from dovetail.request import Request
from dovetail_schedulers.in_order import run_on

NAME = "k-lpm"


class KLPMOptions(BaseModel, extra="forbid", frozen=True):
    """Options of the policy `k-lpm`."""

    k: int = Field(2, ge=1, description="One of as many admissions is of the oldest request.")
    window: int = Field(128, ge=1, description="Waiting requests, by arrival, to look up.")


class KLPM(Scheduler):
    """With k = 1 first come, first served; with a large k nearly longest prefix match."""

    options: KLPMOptions

    def __init__(self, options: KLPMOptions, context: SchedulerContext) -> None:
        super().__init__(options, context)
        self._since_oldest = 0  # admissions since that of an oldest request, that one included

    def schedule(self, step: Step) -> None:
        run_on(step, step.running)
        waiting = list(step.waiting[: self.options.window])
        while waiting and step.tokens_left and step.seqs_left:
            oldest = self._since_oldest % self.options.k == 0
            request = waiting[0] if oldest else max(waiting, key=lambda one: cached(step, one))
            waiting.remove(request)
            grant = step.grant(request)
            if grant:
                self._since_oldest += 1
            elif grant.refused is not Refusal.NOT_NOW:
                break


def cached(step: Step, request: Request) -> int:
    return step.cost(request).cached


def registry() -> Registry:
    """Return the installed plugins, and this policy among them."""
    return registry_with(
        component(
            "scheduler",
            NAME,
            "bench.lab.klpm_scheduling:KLPM",
            "bench.lab.klpm_scheduling:KLPMOptions",
        )
    )
