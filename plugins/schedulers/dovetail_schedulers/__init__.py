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
    ("prefill_first", "PrefillFirst", True, "Whole prompts before answers, never both in a step"),
    ("sarathi", "Sarathi", True, "All answers, then chunks of prompts, within a token budget of its own"),
    ("sjf", "SJF", False, "Shortest predicted answer first"),
    ("srpt", "SRPT", True, "Shortest remaining answer first, with preemption"),
    ("lcf", "LCF", True, "The client served least first, time away included"),
    ("lightllm", "LightLLM", True, "Admission every few steps, if the batch at its largest fits in memory"),
    ("rpm", "RPM", True, "A limit of requests a minute for each client"),
    ("andes", "Andes", True, "At the speed of readers: pauses those whose reader is ahead"),
    ("slo", "SLO", True, "By when first tokens are due, within a bound on the time between tokens; rejects those that would be late"),
    ("prefix_batch", "PrefixBatch", True, "Group by group: those that wait and begin alike run side by side"),
)


@hookimpl
def dovetail_components() -> list[ComponentSpec]:
    return [
        ComponentSpec(
            kind="scheduler",
            name=name,
            target=f"dovetail_schedulers.{name}:{cls}",
            api="0.4",
            options=f"dovetail_schedulers.{name}:{cls}Options" if has_options else None,
            summary=summary,
        )
        for name, cls, has_options, summary in _POLICIES
    ]
