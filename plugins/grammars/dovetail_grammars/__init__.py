"""Built-in grammar backends."""

from __future__ import annotations

from dovetail.api.component import ComponentSpec, hookimpl


@hookimpl
def dovetail_components() -> list[ComponentSpec]:
    return [
        ComponentSpec(
            kind="grammar",
            name="llguidance",
            target="dovetail_grammars.llguidance_backend:LLGuidance",
            api="1.1",
            options="dovetail_grammars.options:GrammarOptions",
            summary="llguidance: parses incrementally, so that schemas need no compilation",
            requires=("llguidance>=1.9",),
        ),
    ]
