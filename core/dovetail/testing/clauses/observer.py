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
    "Decision": TOLD,
    "StepFinished": {"unless an observer had requested": held("raises_nothing"), "*": TOLD},
    "ObserverContext": TOLD,
    "ObserverCapabilities": held("hygiene.capabilities", "raises_nothing"),
    "Observer": {
        "should return quickly": unchecked("no suite judges times; the observer's own time a step is told in the verdict's notes"),
        "An observer may keep": held("forgets"),
        "*": held("hygiene.callbacks", "hygiene.signatures", "empty_run"),
    },
    "Observer.on_started": held("raises_nothing", "failed_run", "leaves_nothing", but="that it raises for options which it can't follow isn't tried"),
}
