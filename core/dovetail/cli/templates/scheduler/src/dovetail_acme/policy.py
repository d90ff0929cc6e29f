"""The policy: it decides which requests run in a step, and how many tokens of each. The step counts tokens, sequences and pages, and refuses grants
that don't fit."""

from dovetail.api.scheduler import Scheduler, Step
from dovetail.request import Request
from pydantic import BaseModel, ConfigDict, Field


class AcmeOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    patience_s: float = Field(2.0, ge=0, description="Seconds after which waiting requests go first, by arrival.")


class AcmeScheduler(Scheduler):
    """A policy that serves the shortest prompt first; requests that have waited long enough go before, in order of arrival."""

    options: AcmeOptions

    def schedule(self, step: Step) -> None:
        for request in step.grant_each(step.running):  # these didn't fit:
            step.grant(request, evict=reversed(step.running))  # the youngest make room

        def rank(request: Request) -> tuple[bool, float]:
            patient = step.now - request.arrival_time < self.options.patience_s
            return (patient, request.prefill_left if patient else request.arrival_time)

        for request in sorted(step.waiting, key=rank):
            if not step.grant(request):
                break  # or small requests would pass a large one forever
