"""The checks that hold the clauses of `dovetail.api.component`, for components of all kinds.

The registry rejects malformed declarations.
"""

from __future__ import annotations

from dovetail.testing.clauses import TOLD, Marks, held

CLAUSES: Marks = {
    "*": TOLD,
    "module": {"imports nothing heavy": held("hygiene.declaration"), "*": TOLD},
    "NoOptions": held("hygiene.options"),
    "ComponentSpec": {
        "imported only when": held("hygiene.declaration", "hygiene.spawn"),
        "instantiated as Class(options, context)": held("hygiene.signatures", "hygiene.spawn"),
        "a pydantic model; None": held("hygiene.options", "hygiene.options_pickle"),
        "*": TOLD,
    },
}
