"""Built-in drafters."""

from __future__ import annotations

from dovetail.api.component import ComponentSpec, hookimpl


@hookimpl
def dovetail_components() -> list[ComponentSpec]:
    return [
        ComponentSpec(
            kind="drafter",
            name="model",
            target="dovetail_drafters.model:NamedModel",
            options="dovetail_drafters.model:ModelOptions",
            summary="A small model of the same vocabulary, which draws with the noise of the model that checks",
        ),
        ComponentSpec(
            kind="drafter",
            name="ngram",
            target="dovetail_drafters.ngram:NgramDrafter",
            options="dovetail_drafters.ngram:NgramOptions",
            summary="Prompt lookup: continues as the request's own text did after its last few tokens",
        ),
        ComponentSpec(
            kind="drafter",
            name="suffix",
            target="dovetail_drafters.suffix:SuffixDrafter",
            options="dovetail_drafters.suffix:SuffixOptions",
            summary="Continues as the request's own text, or earlier answers to the same client, mostly did after the longest match",
        ),
    ]
