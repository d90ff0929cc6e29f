"""Admission as in LightLLM and S-LoRA (Sheng et al., S-LoRA, MLSys '24, arXiv:2311.03285), the
engine in the experiments of the VTC paper (OSDI '24)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field

from dovetail.api.scheduler import (
    Scheduler,
    SchedulerCapabilities,
    SchedulerContext,
    Step,
    StepDone,
)
from dovetail.request import Request
from dovetail_schedulers.counters import CounterOptions, Counters, Turns
from dovetail_schedulers.in_order import run_on
from dovetail_schedulers.lengths import expected_tokens, generated_tokens
from dovetail_schedulers.peak_memory import Size, peak_tokens, size_of


class LightLLMOptions(CounterOptions, frozen=True):
    """Options of the scheduler `lightllm`; weights apply to the orders `vtc` and `lcf`."""

    every: int = Field(10, ge=1, description="Number of decode steps between two admissions.")
    batch_max_tokens: int | None = Field(
        None, ge=1, description="Prompt tokens admitted at once; null: a step's budget."
    )
    reserve: Literal["max_tokens", "predicted"] = Field(
        "max_tokens", description="Output length for which memory must be available."
    )
    order: Literal["arrival", "vtc", "lcf"] = Field(
        "arrival", description="Order of admission: that of `fcfs`, `vtc` or `lcf`."
    )
    client_tokens: int = Field(
        0,
        ge=0,
        description="Pool tokens reserved per client of the batch, as S-LoRA does for adapters.",
    )


class LightLLM(Scheduler):
    """Policy that runs only decodes for `every` steps; then it admits as many whole prompts as fit,
    and computes only these. A prompt fits if the pool can hold the batch's peak; the first always
    fits. With overlap, pages become free a step later than assumed, so that memory may still be
    short; then the youngest are preempted."""

    capabilities = SchedulerCapabilities(
        order="arrival", idles=True, stalls_decodes=True, prefill_limited=False
    )
    options: LightLLMOptions

    def __init__(self, options: LightLLMOptions, context: SchedulerContext) -> None:
        super().__init__(options, context)
        if options.order != "arrival":
            starves = options.order == "lcf"
            self.capabilities = replace(self.capabilities, order=None, starves=starves)
        self.turns = (
            Turns()
            if options.order == "arrival"
            else Counters(options, lift=options.order == "vtc")
        )
        self._decoded = 0  # steps since the last admission

    def schedule(self, step: Step) -> None:
        budget = step.tokens_left
        # a prompt longer than a step's budget
        run_on(step, [request for request in step.running if request.prefill_left])
        if step.tokens_left == budget and (self._decoded >= self.options.every or not step.running):
            self._admit(step, step.waiting)
        self._decoded = 0 if step.tokens_left < budget else self._decoded + 1
        if self._decoded:
            run_on(step, step.decoding)

    def _admit(self, step: Step, waiting: Sequence[Request]) -> None:
        pool = self.context.total_pages * self.context.block_size
        cap = self.options.batch_max_tokens or self.context.token_budget
        sizes = [self._size(step, request) for request in step.running]
        clients = {request.client for request in step.running}
        prompt_tokens = 0
        for request in self.turns.in_turn(waiting):
            too_many = 0 < prompt_tokens > cap - request.num_tokens  # a single one may exceed it
            prompt_tokens += request.num_tokens
            sizes.append(self._size(step, request))
            clients.add(request.client)
            fits = (
                peak_tokens(sizes) < pool - self.options.client_tokens * len(clients)
                and len(sizes) <= self.context.max_num_seqs
            )
            if (len(sizes) > 1 and (too_many or not fits)) or not step.grant(
                request, min_tokens=self.context.token_budget, reserve=True
            ):
                break
            self.turns.admitted(request)
        self.turns.still_wait((*step.waiting, *step.held_back))

    def _size(self, step: Step, request: Request) -> Size:
        """Return the size of a request. One that hasn't started includes its first token."""
        length = (
            request.max_tokens if self.options.reserve == "max_tokens" else expected_tokens(request)
        )
        generated = generated_tokens(request)
        return size_of(
            step,
            request,
            request.prompt_tokens + max(1, generated),
            length - generated - 1,
            self.context.block_size,
        )

    def on_arrived(self, request: Request) -> None:
        self.turns.arrived(request)

    def on_step(self, done: StepDone) -> None:
        self.turns.generated(done)

    def on_finished(self, request: Request) -> None:
        self.turns.finished(request)
