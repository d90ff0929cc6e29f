"""Short answers first, without knowing lengths: the skip-join multi-level feedback queue of
FastServe (Wu et al., arXiv:2305.05920)."""

from __future__ import annotations

from pydantic import BaseModel, Field

from dovetail.api.scheduler import Scheduler, SchedulerContext, Step, StepDone
from dovetail.request import Request
from dovetail_schedulers.in_order import grant_in_order


class MLFQOptions(BaseModel, extra="forbid", frozen=True):
    """Options of the scheduler `mlfq`."""

    levels: int = Field(5, ge=1, le=64, description="Number of queues.")
    quantum: int = Field(
        64,
        ge=1,
        description="Tokens that a request may generate in the first level before it drops to the "
        "next.",
    )
    growth: int = Field(4, ge=2, description="Factor between the quanta of successive levels.")
    starve_s: float = Field(
        10.0,
        gt=0,
        description="Seconds without computation after which a request returns to the first level.",
    )


class MLFQ(Scheduler):
    """A request joins the first level whose quantum is at least its prompt's length, and drops as
    it generates. Lower levels get the remaining sequences and tokens of a step; otherwise they pause
    but keep their pages, unless memory is short: then the lowest are preempted first. A waiting
    request preempts only lower levels; otherwise two requests of one level would evict each other
    in turns."""

    options: MLFQOptions

    def __init__(self, options: MLFQOptions, context: SchedulerContext) -> None:
        super().__init__(options, context)
        self._quanta = [options.quantum * options.growth**level for level in range(options.levels)]
        self._level: dict[Request, int] = {}
        self._used: dict[Request, int] = {}  # request -> tokens generated in its level
        self._last_ran: dict[Request, float] = {}

    def schedule(self, step: Step) -> None:
        waiting = set(step.waiting)
        level = self._level
        order = sorted((*step.running, *step.waiting), key=lambda request: request.arrival_time)
        hungry_since = step.now - self.options.starve_s
        for request in [r for r in order if level[r] and self._last_ran[r] <= hungry_since]:
            level[request], self._used[request], self._last_ran[request] = 0, 0, step.now
        order.sort(key=level.__getitem__)
        grant_in_order(
            step,
            order,
            lambda request: (
                r for r in reversed(order) if request not in waiting or level[r] > level[request]
            ),
        )

    def on_arrived(self, request: Request) -> None:
        fitting = (
            level for level, quantum in enumerate(self._quanta) if quantum >= request.prompt_tokens
        )
        self._level[request] = next(fitting, len(self._quanta) - 1)
        self._used[request], self._last_ran[request] = 0, request.arrival_time

    def on_step(self, done: StepDone) -> None:
        for ran in done.ran:
            request = ran.request
            self._last_ran[request] = done.ended
            self._used[request] += ran.generated
            if (
                self._used[request] >= self._quanta[self._level[request]]
                and self._level[request] < len(self._quanta) - 1
            ):
                self._level[request], self._used[request] = self._level[request] + 1, 0

    def on_finished(self, request: Request) -> None:
        for book in (self._level, self._used, self._last_ran):
            del book[request]
