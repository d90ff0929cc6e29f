"""The checks that hold the clauses of `dovetail.api.observer`."""

from __future__ import annotations

from dovetail.testing.clauses import TOLD, Marks, held, unchecked

CLAUSES: Marks = {
    "module": {
        "can't change anything": held("no_effect", "process_untouched"),
        "dropped after": held("raises_nothing"),
        "read-only": held("request_untouched"),
        "may be reused": held("raises_nothing", "forgets"),
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
        "should return quickly": unchecked(
            "suites don't judge times; the verdict's notes state the observer's time per step"
        ),
        "An observer may keep": held("forgets"),
        "*": held("hygiene.callbacks", "hygiene.signatures", "empty_run"),
    },
    "Observer.on_started": held(
        "raises_nothing",
        "failed_run",
        "leaves_nothing",
        but="raising for options that it can't satisfy isn't tested",
    ),
}
