"""The checks that hold the clauses of `dovetail.api.component`, for components of all kinds.

The registry rejects malformed declarations.
"""

from __future__ import annotations

from dovetail.testing.clauses import TOLD, Marks, held, promised

WAIVERS = promised(
    "testing/test_suite_version.py::"
    "test_a_declared_waiver_is_shown_and_one_for_a_check_that_passes_is_reported"
)

CLAUSES: Marks = {
    "*": TOLD,
    "module": {"imports nothing heavy": held("hygiene.declaration"), "*": TOLD},
    "NoOptions": held("hygiene.options"),
    "ComponentSpec": {
        "imported only when": held("hygiene.declaration", "hygiene.spawn"),
        "instantiated as Class(options, context)": held("hygiene.signatures", "hygiene.spawn"),
        "a pydantic model; None": held("hygiene.options", "hygiene.options_pickle"),
        "version of the conformance suites": promised(
            "testing/test_suite_version.py::"
            "test_checks_of_a_later_suite_are_shown_and_do_not_count",
            "testing/test_suite_version.py::"
            "test_a_package_that_says_so_is_tested_by_the_later_suite",
        ),
        "Checks of later versions": promised(
            "testing/test_suite_version.py::"
            "test_checks_of_a_later_suite_are_shown_and_do_not_count",
        ),
        "`waivers`": WAIVERS,
        "Verdicts show them": WAIVERS,
        "*": TOLD,
    },
}
