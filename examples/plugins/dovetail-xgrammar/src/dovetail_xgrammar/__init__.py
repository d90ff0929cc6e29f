"""The grammar backend XGrammar, for Dovetail."""

from collections.abc import Iterable

from dovetail.api import ComponentSpec, hookimpl


@hookimpl
def dovetail_components() -> Iterable[ComponentSpec]:
    yield ComponentSpec(
        kind="grammar",
        name="xgrammar",
        target="dovetail_xgrammar.backend:XGrammar",
        api="1.0",
        options="dovetail_xgrammar.options:XGrammarOptions",
        summary="XGrammar: precompiles masks, for slower compilation but faster masks",
        requires=("xgrammar>=0.2.8",),
    )
