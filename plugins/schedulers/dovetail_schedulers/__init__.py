"""Built-in scheduling policies."""

from __future__ import annotations

from dovetail.api.component import ComponentSpec, hookimpl

_POLICIES = (
    # name, class, has options, summary
    ("fcfs", "FCFS", False, "First come, first served; the youngest make room"),
    ("priority", "Priority", True, "The most important first, with aging if asked for; evicts the least important"),
    ("vtc", "VTC", True, "Fair shares for clients by virtual token counters"),
    ("mlfq", "MLFQ", True, "Skip-join multi-level feedback queue: short answers first, without knowing lengths"),
    ("lpm", "LPM", True, "Longest cached prefix first"),
    ("edf", "EDF", True, "Earliest deadline first; rejects those that can't be met"),
)


@hookimpl
def dovetail_components() -> list[ComponentSpec]:
    return [
        ComponentSpec(
            kind="scheduler",
            name=name,
            target=f"dovetail_schedulers.{name}:{cls}",
            options=f"dovetail_schedulers.{name}:{cls}Options" if has_options else None,
            summary=summary,
        )
        for name, cls, has_options, summary in _POLICIES
    ]
