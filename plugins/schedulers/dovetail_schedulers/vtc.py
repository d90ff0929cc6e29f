"""Fair shares per client: the virtual token counter of Sheng et al., Fairness in Serving Large
Language Models (OSDI '24, arXiv:2401.00588)."""

from __future__ import annotations

from dovetail.api.scheduler import Refusal, Scheduler, SchedulerContext, Step, StepDone
from dovetail.request import Request
from dovetail_schedulers.counters import CounterOptions, Counters
from dovetail_schedulers.in_order import run_on


class VTCOptions(CounterOptions, frozen=True):
    """Options of the scheduler `vtc`. Requests without a client count as one more client."""


class VTC(Scheduler):
    """Admits requests of the client served least so far. Admitted requests keep running; if memory
    is short, the youngest are preempted."""

    options: CounterOptions
    lift = True

    def __init__(self, options: CounterOptions, context: SchedulerContext) -> None:
        super().__init__(options, context)
        self.counters = Counters(options, lift=self.lift)

    def schedule(self, step: Step) -> None:
        run_on(step, step.running)
        for request in self.counters.in_turn(step.waiting):
            grant = step.grant(request)
            if grant.refused not in (None, Refusal.NOT_NOW):
                break
            if grant:
                self.counters.admitted(request)
        self.counters.still_wait((*step.waiting, *step.held_back))

    def on_arrived(self, request: Request) -> None:
        self.counters.arrived(request)

    def on_step(self, done: StepDone) -> None:
        self.counters.generated(done)

    def on_finished(self, request: Request) -> None:
        self.counters.finished(request)
