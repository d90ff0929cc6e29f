"""`plan_by_arrival`: plans a step in place of a policy that would let the engine wait forever.
`EngineCore` calls it."""

from __future__ import annotations

from dovetail.engine.step import PlannedStep


def plan_by_arrival(step: PlannedStep) -> None:
    """Grant the running requests, older ones evicting younger ones; without any, the oldest waiting
    request. Reject the oldest request if that grants nothing, so that the others go on."""
    for request in step.grant_each(step.running):
        step.grant(request, evict=reversed(step.running))
    if step.granted:
        return
    oldest = next(iter((*step.running, *step.waiting)), None)
    if oldest is None:
        return
    refusal = step.grant(oldest).refused
    if refusal is not None:
        step.reject(oldest, f"the engine can't run it, with nothing else running: {refusal.value}")
