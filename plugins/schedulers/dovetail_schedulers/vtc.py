"""Fair shares for clients: the virtual token counter of Sheng et al., Fairness in Serving Large Language Models (OSDI '24, arXiv:2401.00588)."""

from __future__ import annotations

from collections import defaultdict

from pydantic import BaseModel, Field, PositiveFloat

from dovetail.api.scheduler import Context, Refusal, Scheduler, Step, StepDone
from dovetail.request import Request


class VTCOptions(BaseModel, extra="forbid", frozen=True):
    """Options of the scheduler `vtc`. Requests that name no client count as those of one more."""

    input_weight: float = Field(1.0, ge=0, allow_inf_nan=False, description="What a prompt token costs its client.")
    output_weight: float = Field(2.0, gt=0, allow_inf_nan=False, description="What a generated token costs its client.")
    weights: dict[str, PositiveFloat] = Field({}, description="Shares by client: twice the weight, twice the service. 1 if not named.")


class VTC(Scheduler):
    """Admits a request of the client that was served least so far. Those admitted run on; when memory lacks, the youngest make room."""

    options: VTCOptions

    def __init__(self, options: VTCOptions, context: Context) -> None:
        super().__init__(options, context)
        self._served: defaultdict[str | None, float] = defaultdict(float)  # the counters
        self._queued: set[str | None] = set()  # clients with requests waiting
        self._last_admitted: str | None = None  # client

    def schedule(self, step: Step) -> None:
        for request in step.grant_each(step.running):
            step.grant(request, evict=reversed(step.running))
        waiting = list(step.waiting)
        while waiting:
            request = min(waiting, key=lambda r: self._served[r.client])  # of equals, who waits longest
            waiting.remove(request)
            grant = step.grant(request)
            if grant.refused not in (None, Refusal.NOT_NOW):
                break
            if grant:
                self._last_admitted = request.client
                self._charge(request.client, 0 if request.preemptions else self.options.input_weight * request.prompt_tokens)  # again: free
        self._queued = {request.client for request in step.waiting}

    def on_arrival(self, request: Request) -> None:
        if request.client not in self._queued:  # time without requests earns no credit
            others = self._queued or {self._last_admitted}
            self._served[request.client] = max(self._served[request.client], min(self._served[other] for other in others))
            self._queued.add(request.client)

    def on_step(self, done: StepDone) -> None:
        for request, _, generated in done.ran:
            self._charge(request.client, self.options.output_weight * generated)

    def _charge(self, client: str | None, cost: float) -> None:
        self._served[client] += cost / (self.options.weights.get(client, 1.0) if client is not None else 1.0)
