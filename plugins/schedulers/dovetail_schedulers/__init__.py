"""Built-in scheduling policies."""

from __future__ import annotations

from dovetail.api.component import ComponentSpec, hookimpl

_POLICIES = (
    # name, class, has options, summary
    ("fcfs", "FCFS", False, "First come, first served; preempts the youngest"),
    (
        "priority",
        "Priority",
        True,
        "Most important first, with optional aging; preempts the least important",
    ),
    ("vtc", "VTC", True, "Fair shares per client by virtual token counters"),
    (
        "mlfq",
        "MLFQ",
        True,
        "Skip-join multi-level feedback queue: short answers first, without knowing lengths",
    ),
    ("lpm", "LPM", True, "Longest cached prefix first"),
    ("edf", "EDF", True, "Earliest deadline first; rejects those that can't be met"),
    ("prefill_first", "PrefillFirst", True, "Whole prompts before decodes, never both in one step"),
    (
        "sarathi",
        "Sarathi",
        True,
        "All decodes, then chunks of prompts, within its own token budget",
    ),
    ("sjf", "SJF", False, "Shortest predicted answer first"),
    ("srpt", "SRPT", True, "Shortest remaining answer first, with preemption"),
    ("lcf", "LCF", True, "Least-served client first, including idle time"),
    ("lightllm", "LightLLM", True, "Admission every few steps, if the batch's peak fits in memory"),
    ("rpm", "RPM", True, "Limits requests per minute and client"),
    ("andes", "Andes", True, "Reading speed: pauses requests that are ahead of their readers"),
    (
        "slo",
        "SLO",
        True,
        "By first-token deadline, within a bound on inter-token latency; rejects requests that "
        "would be late",
    ),
    ("prefix_batch", "PrefixBatch", True, "Batches waiting requests by common prefix"),
)


@hookimpl
def dovetail_components() -> list[ComponentSpec]:
    return [
        ComponentSpec(
            kind="scheduler",
            name=name,
            target=f"dovetail_schedulers.{name}:{cls}",
            api="1.0",
            options=f"dovetail_schedulers.{name}:{cls}Options" if has_options else None,
            summary=summary,
        )
        for name, cls, has_options, summary in _POLICIES
    ]
