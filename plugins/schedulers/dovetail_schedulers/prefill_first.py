"""Prompts before decodes: vLLM's original scheduler (Kwon et al., PagedAttention, SOSP '23,
arXiv:2309.06180, section 4.5; given as algorithm 2 of Sarathi-Serve, OSDI '24,
arXiv:2403.02310)."""

from __future__ import annotations

from pydantic import BaseModel, Field

from dovetail.api.scheduler import Scheduler, SchedulerCapabilities, Step
from dovetail_schedulers.in_order import run_on


class PrefillFirstOptions(BaseModel, extra="forbid", frozen=True):
    """Options of the scheduler `prefill_first`."""

    watermark: float = Field(
        0.01,
        ge=0,
        lt=1,
        description="Share of all pages that admissions leave free for the answers of running "
        "requests.",
    )


class PrefillFirst(Scheduler):
    """Each step computes either whole prompts, first come, first served, or, if none can start, one
    token of each answer: never both. If memory is short, the youngest are preempted and recomputed
    later. A prompt longer than a step's budget fills several steps of its own."""

    capabilities = SchedulerCapabilities(
        order="arrival", idles=True, stalls_decodes=True, prefill_limited=False
    )
    options: PrefillFirstOptions

    def schedule(self, step: Step) -> None:
        if not self._prefill(step):
            run_on(step, step.decoding)

    def _prefill(self, step: Step) -> bool:
        """Grant prompts; return True if there were any."""
        budget = step.tokens_left
        spare = self.options.watermark * self.context.total_pages if step.running else 0
        # decoding requests count, too, although they run in other steps
        free_seqs = self.context.max_num_seqs - len(step.running)
        run_on(step, [request for request in step.running if request.prefill_left])
        for request in step.waiting[: max(0, free_seqs)]:
            if step.free_pages - step.cost(request).pages < spare or not step.grant(
                request, min_tokens=self.context.token_budget, reserve=True
            ):
                break
        return step.tokens_left < budget
