"""Virtual token counters: the service that each client has received, for policies that share an
engine fairly.

Sheng et al., Fairness in Serving Large Language Models (OSDI '24, arXiv:2401.00588), algorithm
2.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush

from pydantic import BaseModel, Field, PositiveFloat

from dovetail.api.scheduler import StepDone
from dovetail.request import Request

LOOK_AFTER = 64  # least number of requests that end between two cleanups


class CounterOptions(BaseModel, extra="forbid", frozen=True):
    """Costs of tokens. Requests without a client count as one more client."""

    input_weight: float = Field(
        1.0, ge=0, allow_inf_nan=False, description="Cost of a prompt token."
    )
    output_weight: float = Field(
        2.0, gt=0, allow_inf_nan=False, description="Cost of a generated token."
    )
    weights: dict[str, PositiveFloat] = Field(
        {},
        description="Shares by client: twice the weight, twice the service. Default per client: 1.",
    )


class Turns:
    """Order in which clients take turns; here by arrival, without state. The policy reports all
    request events to it."""

    def arrived(self, request: Request) -> None: ...

    def in_turn(self, waiting: Iterable[Request]) -> Iterator[Request]:
        """Yield the waiting requests, given in order of arrival, in the order in which they should
        be admitted."""
        return iter(waiting)

    def admitted(self, request: Request) -> None: ...

    def still_wait(self, waiting: Iterable[Request]) -> None:
        """Record that a step was planned without admitting these requests."""

    def generated(self, done: StepDone) -> None: ...

    def finished(self, request: Request) -> None: ...


class Counters(Turns):
    """Turns by the least-served client. `lift`: a client that had nothing waiting starts at the
    smallest counter of those that have, so that idle time earns no credit.

    Clients are forgotten occasionally if that changes no decision: a client has no request, and
    either its counter is 0, like a new one, or counters are lifted and its own is at most any that
    it could be lifted to. Those are the counters of clients with requests and of the last client
    admitted. The smallest of them never decreases, since a client that joins is lifted to it. So
    counters are kept for clients with requests, for those served more than one being served, for at
    most as many others, and some `LOOK_AFTER`. Without `lift`, every client ever served keeps its
    counter.
    """

    def __init__(self, options: CounterOptions, *, lift: bool) -> None:
        self._options = options
        self._lift = lift
        # client -> weighted tokens
        self.served: defaultdict[str | None, float] = defaultdict(float)
        self._unfinished: Counter[str | None] = Counter()  # client -> number of its requests
        self._queued: set[str | None] = set()  # clients with requests waiting
        self._last_admitted: str | None = None  # client
        self._look_after = LOOK_AFTER  # requests still to end before the next cleanup

    def arrived(self, request: Request) -> None:
        self._unfinished[request.client] += 1
        if request.client not in self._queued:
            if self._lift:
                others = self._queued or {self._last_admitted}
                self.served[request.client] = max(
                    self.served[request.client], min(self.served[other] for other in others)
                )
            self._queued.add(request.client)

    def in_turn(self, waiting: Iterable[Request]) -> Iterator[Request]:
        """Yield, one at a time, the longest-waiting request of the client that has been served
        least so far. Between two requests, only the client of the previous one may be charged."""
        queues: defaultdict[str | None, deque[tuple[int, Request]]] = defaultdict(deque)
        for place, request in enumerate(waiting):
            queues[request.client].append((place, request))
        turns = [(self.served[client], queue[0][0], queue) for client, queue in queues.items()]
        heapify(turns)
        while turns:
            _, _, queue = heappop(turns)
            _, request = queue.popleft()
            yield request
            if queue:
                heappush(turns, (self.served[request.client], queue[0][0], queue))

    def admitted(self, request: Request) -> None:
        """Charge the prompt once: recomputation after preemption is free, and so is the part that a
        sample of n > 1 shares with its siblings."""
        self._last_admitted = request.client
        fresh = request.prompt_tokens - (request.cached_tokens if request.parent is not None else 0)
        self._charge(
            request.client, 0 if request.preemptions else self._options.input_weight * fresh
        )

    def still_wait(self, waiting: Iterable[Request]) -> None:
        self._queued = {request.client for request in waiting}

    def generated(self, done: StepDone) -> None:
        for ran in done.ran:
            self._charge(ran.request.client, self._options.output_weight * ran.generated)

    def finished(self, request: Request) -> None:
        self._unfinished[request.client] -= 1
        if not self._unfinished[request.client]:
            del self._unfinished[request.client]
        self._look_after -= 1
        if self._look_after <= 0:
            self._forget()
            # so that the cost per request doesn't grow with the number of clients
            self._look_after = max(LOOK_AFTER, len(self.served))

    def _forget(self) -> None:
        present = {*self._unfinished, *self._queued, self._last_admitted}
        floor = min(self.served[client] for client in present) if self._lift else 0.0
        kept = {
            client: served
            for client, served in self.served.items()
            if served > floor or client in present
        }
        self.served = defaultdict(float, kept)  # a new dict, since dicts don't shrink on deletion

    def _charge(self, client: str | None, cost: float) -> None:
        self.served[client] += cost / (
            self._options.weights.get(client, 1.0) if client is not None else 1.0
        )
