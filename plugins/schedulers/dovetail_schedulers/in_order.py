"""Serving requests in a policy's order, with eviction: what several policies here share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from dovetail.api.scheduler import Refusal, Step
from dovetail.request import Request


def run_on(step: Step, requests: Iterable[Request]) -> None:
    """Grant to each of `requests`, which run already; for who lacks memory, the youngest of all that run make room."""
    for request in step.grant_each(requests):
        step.grant(request, evict=reversed(step.running))


def grant_in_order(step: Step, order: Sequence[Request], evict: Callable[[Request], Iterable[Request]]) -> None:
    """Grant to everyone in `order` (running and waiting), the first is the most important; `evict(request)` may be preempted for it.

    Each decode keeps its token, however long the prefills ahead of it are. Once a prefill lacks memory or a seat, nobody behind it is
    admitted, or the small would pass the large for ever; nor behind one who was evicted in this step, and could not take what it left.
    """
    decoding, running = set(step.decoding), set(step.running)
    owed = len(decoding)  # tokens, to decodes further down
    admits = True

    def passed_by(request: Request, refused: Refusal | None) -> bool:
        evicted = refused is Refusal.NOT_NOW and request in running and request in step.waiting
        return evicted or refused in (Refusal.MEMORY, Refusal.SEATS)

    for decodes, group in groupby(order, decoding.__contains__):
        if decodes:
            members = list(group)
            owed -= len(members)
            for request in step.grant_each(members):
                grant = step.grant(request, evict=evict(request))
                admits = admits and not passed_by(request, grant.refused)
            continue
        for request in group:
            if admits or request in running:
                if step.tokens_left <= owed:
                    break
                grant = step.grant(request, step.tokens_left - owed, evict=evict(request))
                admits = admits and not passed_by(request, grant.refused)
