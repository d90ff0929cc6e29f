"""Serves requests in a policy's order, with eviction; shared by several policies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from dovetail.api.scheduler import Refusal, Step
from dovetail.request import Request


def run_on(step: Step, requests: Iterable[Request]) -> bool:
    """Grant to each of `requests`, which are running; if one lacks memory, the youngest of all
    running requests are preempted. Returns False if one was refused."""
    refused = [
        step.grant(request, evict=reversed(step.running)).refused
        for request in step.grant_each(requests)
    ]
    return set(refused) <= {None, Refusal.NOT_NOW}


def grant_in_order(
    step: Step, order: Sequence[Request], evict: Callable[[Request], Iterable[Request]]
) -> None:
    """Grant to all requests in `order` (running and waiting), most important first; requests in
    `evict(request)` may be preempted for `request`.

    Each decode gets its token, however long the prefills before it are. Once a prefill lacks memory
    or `max_num_seqs` requests run, no later request is admitted, or small ones would overtake large
    ones forever; nor is any request after one that was evicted in this step, which can't use the
    memory it freed.
    """
    decoding = set(step.decoding)
    running = set(step.running)
    owed = len(decoding)  # tokens reserved for later decodes
    admits = True

    def passed_by(request: Request, refused: Refusal | None) -> bool:
        evicted = refused is Refusal.NOT_NOW and request in running and request in step.waiting
        return evicted or refused in (Refusal.MEMORY, Refusal.SEQS)

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
