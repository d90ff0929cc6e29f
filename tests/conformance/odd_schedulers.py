"""Right scheduling policies in styles that a suite might take for wrong."""

from __future__ import annotations

from collections.abc import Generator
from heapq import heapify, heappush
from itertools import count

from pydantic import BaseModel

from dovetail.api.scheduler import Scheduler, SchedulerCapabilities, SchedulerContext, Step
from dovetail.request import Request
from dovetail_schedulers.in_order import grant_in_order


class FromItsHeap(Scheduler):
    """Plans from a heap of all requests that have arrived, not from the lists of the step, and
    removes a request only when it has finished."""

    capabilities = SchedulerCapabilities(order="arrival")

    def __init__(self, options: BaseModel, context: SchedulerContext) -> None:
        super().__init__(options, context)
        self.numbers = count()
        self.heap = list[tuple[float, int, Request]]()

    def on_arrived(self, request: Request) -> None:
        heappush(self.heap, (request.arrival_time, next(self.numbers), request))

    def on_finished(self, request: Request) -> None:
        self.heap = [entry for entry in self.heap if entry[2] is not request]
        heapify(self.heap)

    def schedule(self, step: Step) -> None:
        shown = {*step.running, *step.waiting}
        order = [request for _, _, request in sorted(self.heap) if request in shown]
        grant_in_order(step, order, lambda request: reversed(order))


class InAGenerator(Scheduler):
    """Is one generator, to which steps are sent, and which counts them. Serves by arrival, and
    notes the count with the first request."""

    capabilities = SchedulerCapabilities(order="arrival")

    def __init__(self, options: BaseModel, context: SchedulerContext) -> None:
        super().__init__(options, context)
        self.counter = self._count()
        next(self.counter)

    def schedule(self, step: Step) -> None:
        self.counter.send(step)

    def _count(self) -> Generator[None, Step, None]:
        steps = 0
        while True:
            self._plan((yield), steps)
            steps += 1

    @staticmethod
    def _plan(step: Step, number: int) -> None:
        order = sorted((*step.running, *step.waiting), key=lambda request: request.arrival_time)
        for request in order[:1]:
            step.note(request, f"step {number}")
        grant_in_order(step, order, lambda request: reversed(order))
