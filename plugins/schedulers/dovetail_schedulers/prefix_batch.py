"""Schedules requests with a common prefix together, so that it is computed once and evicted after
the last: BatchLLM (Zheng et al., arXiv:2412.03594), with its global grouping applied to the waiting
requests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, count

from pydantic import BaseModel, Field

from dovetail.api.scheduler import Refusal, Scheduler, SchedulerContext, Step
from dovetail.request import Request
from dovetail_schedulers.in_order import run_on


class PrefixBatchOptions(BaseModel, extra="forbid", frozen=True):
    """Options of the scheduler `prefix_batch`."""

    least_tokens: int = Field(
        256, ge=1, description="Number of shared prompt tokens from which requests form a group."
    )
    window: int = Field(256, ge=1, description="Number of waiting requests, by arrival, to group.")
    patience_s: float = Field(
        10.0,
        ge=0,
        description="Seconds after which waiting requests go first, by arrival, regardless of "
        "their group.",
    )


class PrefixBatch(Scheduler):
    """Admits waiting requests group by group: first the group with the longest cached prefix, and
    among groups without one, the group that will share most. Admitted requests keep running; if
    memory is short, the youngest are preempted."""

    options: PrefixBatchOptions

    def __init__(self, options: PrefixBatchOptions, context: SchedulerContext) -> None:
        super().__init__(options, context)
        self._numbers = count()
        self._group: dict[Request, int] = {}  # group number of each request seen waiting

    def schedule(self, step: Step) -> None:
        run_on(step, step.running)
        if not (step.tokens_left and step.seqs_left and step.free_pages):
            return
        groups = self._groups(step, step.waiting[: self.options.window])
        for request in chain(
            *sorted(groups, key=lambda group: self._rank(step, group))
        ):  # ties by arrival
            if step.grant(request).refused not in (None, Refusal.NOT_NOW):
                break

    def _groups(self, step: Step, requests: Sequence[Request]) -> list[list[Request]]:
        """Return `requests` by group, both in order of arrival. A new request joins the group whose
        first member shares the most tokens."""
        groups: dict[int, list[Request]] = {}
        for request in requests:
            if request not in self._group:
                shared, number = max(
                    (
                        (step.shared_tokens(members[0], request), number)
                        for number, members in groups.items()
                    ),
                    default=(0, 0),
                )
                self._group[request] = (
                    number if shared >= self.options.least_tokens else next(self._numbers)
                )
            groups.setdefault(self._group[request], []).append(request)
        return list(groups.values())

    def _rank(self, step: Step, group: Sequence[Request]) -> tuple[bool, float, int]:
        """Return the sort key of a group: long-waiting ones first, by arrival; then by cached
        tokens, then by tokens to be shared."""
        if group[0].arrival_time <= step.now - self.options.patience_s:
            return False, group[0].arrival_time, 0
        shared = step.shared_tokens(group[0], group[-1]) if len(group) > 1 else 0
        return True, -step.cost(group[0]).cached, -shared * (len(group) - 1)

    def on_finished(self, request: Request) -> None:
        self._group.pop(request, None)
