"""The checks that hold the clauses of `dovetail.api.observer`."""

from __future__ import annotations

from dovetail.testing.clauses import TOLD, Marks, held, promised

CLAUSES: Marks = {
    "module": {
        "can't change anything": held("no_effect", "process_untouched", "first_use"),
        "dropped after": held("raises_nothing"),
        "frozen values": held("no_effect"),
        "read-only": held("request_untouched"),
        "may be reused": held("raises_nothing", "reused_ids", "forgets"),
        "*": TOLD,
    },
    "EngineStarted": TOLD,
    "RequestAdmitted": TOLD,
    "RequestFinished": held("raises_nothing"),
    "Act": TOLD,
    "Decision": TOLD,
    "StepFinished": {"unless an observer had requested": held("raises_nothing"), "*": TOLD},
    "ObserverContext": TOLD,
    "ObserverCapabilities": held("hygiene.capabilities", "raises_nothing"),
    "Observer": {
        "should return quickly": TOLD,
        "An observer may keep": held("forgets", "forgets_bytes", "long_run"),
        "*": held("hygiene.callbacks", "hygiene.signatures", "empty_run"),
    },
    "Observer.on_started": promised(
        "engine/test_engine_failures.py::"
        "test_an_observer_that_can_not_do_what_its_options_say_keeps_the_engine_from_starting",
        by=("raises_nothing", "failed_run", "leaves_nothing"),
    ),
}
