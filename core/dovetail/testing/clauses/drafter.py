"""The checks that hold the clauses of `dovetail.api.drafter`."""

from __future__ import annotations

from dovetail.testing.clauses import TOLD, Marks, held

CLAUSES: Marks = {
    "module": TOLD,
    "DrafterContext": {
        "Ids are 0 to": held("ids"),
        "another vocabulary or": held("raises_nothing"),
        "is asked for at once": held("most"),
        "*": TOLD,
    },
    "Drafter": {
        "one thread at a time": held("any_thread", "forgets_anywhere"),
        "may only be proposed": held("client", "strangers"),
        "It sees all tokens": held(
            "request_untouched", "deterministic", "ties", "process_untouched", "first_use"
        ),
        "*": TOLD,
    },
    "Drafter.propose": {
        "the tokens that are likely": held("most", "ids", "raises_nothing"),
        "microseconds": TOLD,
        "*": TOLD,
    },
    "Drafter.on_finished": held("forgets", "raises_nothing"),
    "ModelDrafter": TOLD,
    "ModelDrafter.head": held("model", "head"),
    "ModelDrafter.model": held("model"),
    "ModelDrafter.propose": held("model"),
}
