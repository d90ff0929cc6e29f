"""Fair shares for clients: the virtual token counter of Sheng et al., Fairness in Serving Large Language Models (OSDI '24, arXiv:2401.00588)."""

from __future__ import annotations

from collections import defaultdict, deque

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat

from dovetail.api.scheduler import Context, Refusal, Scheduler, Step, StepDone
from dovetail.request import Request


class VTCOptions(BaseModel):
    """Options of the scheduler `vtc`. A request without a client belongs to a client of its own, the same for all such."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    input_weight: float = Field(1.0, ge=0, allow_inf_nan=False, description="What a prompt token costs its client.")
    output_weight: float = Field(2.0, gt=0, allow_inf_nan=False, description="What a generated token costs its client.")
    weights: dict[str, PositiveFloat] = Field({}, description="Shares by client: twice the weight, twice the service. 1 if not named.")


class VTC(Scheduler):
    """Admits a request of the client that was served least so far. Those admitted run on; when memory lacks, the youngest make room."""

    options: VTCOptions

    def __init__(self, options: VTCOptions, context: Context) -> None:
        super().__init__(options, context)
        self._served: defaultdict[str | None, float] = defaultdict(float)  # the counters
        self._queued: dict[str | None, set[Request]] = {}  # of each client that has some
        self._last_client: str | None = None  # whose request left the queue last

    def schedule(self, step: Step) -> None:
        for request in step.grant_each(step.running):
            step.grant(request, evict=reversed(step.running))
        queues: dict[str | None, deque[Request]] = {}
        for request in step.waiting if step.tokens_left and step.seqs_left and step.free_blocks else ():
            queues.setdefault(request.client, deque()).append(request)
        while queues:
            client = min(queues, key=self._served.__getitem__)  # of equals, who waits longest
            request = queues[client].popleft()
            if not queues[client]:
                del queues[client]
            refused = step.grant(request).refused
            if refused is None:
                self._leave_queue(request)
                if not request.preemptions:  # computing a prompt again isn't charged again
                    self._charge(request, self.options.input_weight * request.prompt_tokens)
            elif refused is not Refusal.NOT_NOW:
                break

    def on_arrival(self, request: Request) -> None:
        client = request.client
        if client not in self._queued:  # time without requests earns no credit
            others = [self._served[other] for other in self._queued] or [self._served[self._last_client]]
            self._served[client] = max(self._served[client], min(others))
        self._queued.setdefault(client, set()).add(request)

    def on_step(self, done: StepDone) -> None:
        for request, _, generated in done.ran:
            self._charge(request, self.options.output_weight * generated)

    def on_preempted(self, request: Request) -> None:
        self._queued.setdefault(request.client, set()).add(request)

    def on_finished(self, request: Request) -> None:
        self._leave_queue(request)

    def _charge(self, request: Request, cost: float) -> None:
        self._served[request.client] += cost / self.options.weights.get(request.client or "", 1.0)

    def _leave_queue(self, request: Request) -> None:
        queue = self._queued.get(request.client, set())
        if request in queue:
            queue.remove(request)
            self._last_client = request.client
            if not queue:
                del self._queued[request.client]
