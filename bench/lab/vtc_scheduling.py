"""The admission of the server that the VTC paper measured: `lightllm`, with a router that reads its
socket once a step. `vtc_arena.py` simulates with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from bench.lab.policies import component, registry_with
from dovetail.api.scheduler import SchedulerContext, Step, StepDone
from dovetail.registry.registry import Registry
from dovetail.request import Request
from dovetail_schedulers.counters import CounterOptions, Counters
from dovetail_schedulers.lightllm import LightLLM, LightLLMOptions

NAME = "s-lora"


class ArtifactCounters(Counters):
    """The counters of VTC's artifact. If no other client waits, the counter of a client that joins
    stays as it is. Tokens are charged when a decode step begins, so the first of an answer, which a prefill yields,
    is free. `twice`: where a request ends, all rows of the step are charged once more, as in the
    version of June 2024 (`_handle_finish_req` calls `update_counter`, which the step has called
    before)."""

    def __init__(self, options: CounterOptions, *, lift: bool, twice: bool) -> None:
        super().__init__(options, lift=lift)
        self._twice = twice
        self._rows: tuple[str | None, ...] = ()  # clients of the last step, until charged again

    def arrived(self, request: Request) -> None:
        if not self._queued:
            self._last_admitted = request.client
        super().arrived(request)

    def generated(self, done: StepDone) -> None:
        self._rows = tuple(ran.request.client for ran in done.ran)
        for ran in done.ran:
            if ran.computed == 1:
                self._charge(ran.request.client, self._options.output_weight)

    def finished(self, request: Request) -> None:
        super().finished(request)
        for client in self._rows if self._twice else ():
            self._charge(client, self._options.output_weight)
        self._rows = ()


class SLoRASchedulerOptions(LightLLMOptions, frozen=True):
    """Options of the policy `s-lora`."""

    charges: Literal["once", "twice"] = Field(
        "once", description="How often a step in which a request ends is charged."
    )


class SLoRAScheduler(LightLLM):
    """LightLLM, which hears a step late of a request that arrives while others run: its event loop
    turns to its socket after the next step has begun. Where a request ends, the loop turns once
    more, and it hears in time."""

    options: SLoRASchedulerOptions

    def __init__(self, options: SLoRASchedulerOptions, context: SchedulerContext) -> None:
        super().__init__(options, context)
        if options.order != "arrival":
            self.turns = ArtifactCounters(
                options, lift=options.order == "vtc", twice=options.charges == "twice"
            )

    # ids of those that waited when the step before was planned
    _heard_of: frozenset[str] = frozenset()
    _turned = False  # a request has ended since then

    def schedule(self, step: Step) -> None:
        super().schedule(step)
        self._heard_of = frozenset(request.id for request in step.waiting)
        self._turned = False

    def on_finished(self, request: Request) -> None:
        super().on_finished(request)
        self._turned = True

    def _admit(self, step: Step, waiting: Sequence[Request]) -> None:
        super()._admit(
            step,
            [
                request
                for request in waiting
                if request.id in self._heard_of or self._turned or not step.running
            ],
        )


def registry() -> Registry:
    """Return the installed plugins, and this policy and its executor among them."""
    return registry_with(
        component(
            "scheduler",
            NAME,
            "bench.lab.vtc_scheduling:SLoRAScheduler",
            "bench.lab.vtc_scheduling:SLoRASchedulerOptions",
        ),
        component(
            "executor",
            NAME,
            "bench.lab.vtc_pool:SLoRAExecutor",
            "bench.lab.vtc_pool:SLoRAOptions",
        ),
    )
