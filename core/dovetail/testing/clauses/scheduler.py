"""The checks that hold the clauses of `dovetail.api.scheduler`.

The step itself raises on misuse; `scheduler.sound` checks that a policy never causes this.
"""

from __future__ import annotations

from dovetail.testing.clauses import TOLD, Marks, held

CLAUSES: Marks = {
    "*": TOLD,
    "Step": {"It is closed": held("sound"), "*": TOLD},
    "Step.held_back": held("adapters"),
    "Step.grant": {
        "Raises `PolicyError`": held("sound"),
        "must not act on the step": held("sound"),
        "Fewer than n": held("prefill_limit"),
        "A prompt that can't be divided": held("indivisible"),
        "*": TOLD,
    },
    "Step.wake_at": held("sound", "finishes"),
    "SchedulerCapabilities": {
        "`order`": held("order", "order_ties"),
        "The next four exempt": held(
            "no_idling", "no_starvation", "no_starvation_beside", "no_rejection", "no_stalls"
        ),
        "`prefill_limited`": held("prefill_limit"),
        "unless it stalls decodes": TOLD,
        "*": held("hygiene.capabilities"),
    },
    "SchedulerContext": {"computed in a step": held("budget", "seqs"), "*": TOLD},
    "Scheduler": {
        "may keep requests": held("forgets", "ids", "reused_ids", "long_run"),
        "may not read another": held("replay", "blocks", "read_only"),
        "ends the engine": held("sound", "aborts"),
        "*": TOLD,
    },
    "Scheduler.schedule": held("sound", "memory", "finishes", "recompute"),
    "Scheduler.on_finished": held("aborts", "forgets"),
}
