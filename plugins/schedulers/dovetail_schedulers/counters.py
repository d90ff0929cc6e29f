"""Virtual token counters: what each client was served so far, for the policies that share an engine fairly among clients.

Sheng et al., Fairness in Serving Large Language Models (OSDI '24, arXiv:2401.00588), algorithm 2.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from pydantic import BaseModel, Field, PositiveFloat

from dovetail.api.scheduler import StepDone
from dovetail.request import Request


class CounterOptions(BaseModel, extra="forbid", frozen=True):
    """What tokens cost. Requests that name no client count as those of one more."""

    input_weight: float = Field(1.0, ge=0, allow_inf_nan=False, description="What a prompt token costs its client.")
    output_weight: float = Field(2.0, gt=0, allow_inf_nan=False, description="What a generated token costs its client.")
    weights: dict[str, PositiveFloat] = Field({}, description="Shares by client: twice the weight, twice the service. 1 if not named.")


class Counters:
    """`lift`: a client that had nothing waiting begins at the least of those that have, so that time without requests earns no credit."""

    def __init__(self, options: CounterOptions, *, lift: bool) -> None:
        self._options = options
        self._lift = lift
        self.served: defaultdict[str | None, float] = defaultdict(float)  # client -> weighted tokens
        self._queued: set[str | None] = set()  # clients with requests waiting
        self._last_admitted: str | None = None  # client

    def arrived(self, request: Request) -> None:
        if request.client not in self._queued:
            if self._lift:
                others = self._queued or {self._last_admitted}
                self.served[request.client] = max(self.served[request.client], min(self.served[other] for other in others))
            self._queued.add(request.client)

    def in_turn(self, waiting: Iterable[Request]) -> Iterator[Request]:
        """Each time one of the client that was served least by then; of equals, who waits longest."""
        left = list(waiting)
        while left:
            request = min(left, key=lambda request: self.served[request.client])
            left.remove(request)
            yield request

    def admitted(self, request: Request) -> None:
        """Charges its prompt, once: computing it again after a preemption is free."""
        self._last_admitted = request.client
        self._charge(request.client, 0 if request.preemptions else self._options.input_weight * request.prompt_tokens)

    def still_wait(self, waiting: Iterable[Request]) -> None:
        """The step is planned, and these were not admitted."""
        self._queued = {request.client for request in waiting}

    def generated(self, done: StepDone) -> None:
        for request, _, tokens in done.ran:
            self._charge(request.client, self._options.output_weight * tokens)

    def _charge(self, client: str | None, cost: float) -> None:
        self.served[client] += cost / (self._options.weights.get(client, 1.0) if client is not None else 1.0)
