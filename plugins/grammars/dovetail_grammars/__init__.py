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
            options="dovetail_grammars.options:GrammarOptions",
            summary="llguidance: parses incrementally, so that schemas need no compilation",
            requires=("llguidance>=1.9",),
        ),
        ComponentSpec(
            kind="grammar",
            name="xgrammar",
            target="dovetail_grammars.xgrammar_backend:XGrammar",
            options="dovetail_grammars.options:GrammarOptions",
            summary="XGrammar: precompiles masks, for slower compilation but faster masks",
            requires=("xgrammar>=0.2.8",),
        ),
    ]
