"""Stall-free batching: Agrawal et al., Taming Throughput-Latency Tradeoff in LLM Inference with
Sarathi-Serve (OSDI '24, arXiv:2403.02310)."""

from __future__ import annotations

from pydantic import BaseModel, Field

from dovetail.api.scheduler import Scheduler, SchedulerCapabilities, Step
from dovetail_schedulers.in_order import run_on


class SarathiOptions(BaseModel, extra="forbid", frozen=True):
    """Options of the scheduler `sarathi`."""

    chunk_tokens: int = Field(
        512,
        ge=1,
        description="Tokens per step, including decodes: fewer keep inter-token latency low, more "
        "finish prompts sooner.",
    )


class Sarathi(Scheduler):
    """Algorithm 3 of the paper: all decodes, then prompts in progress, then new ones, in chunks
    that fit the policy's own budget per step, which may be below the engine's. A prompt takes all
    its pages when it starts. If memory is short, the youngest are preempted."""

    capabilities = SchedulerCapabilities(order="arrival", idles=True)
    options: SarathiOptions

    def schedule(self, step: Step) -> None:
        # the part of the engine's budget above ours
        unused = max(0, step.tokens_left - self.options.chunk_tokens)
        run_on(step, step.decoding)
        begun = [request for request in step.running if request.prefill_left]
        for request in (*begun, *step.waiting):
            left = step.tokens_left - unused  # negative if the decodes exceed it
            if left <= 0 or not step.grant(
                request,
                left,
                reserve=True,
                evict=reversed(step.running) if request in begun else (),
            ):
                break
