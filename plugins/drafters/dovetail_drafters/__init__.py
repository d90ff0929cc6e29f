"""Built-in drafters."""

from __future__ import annotations

from dovetail.api.component import ComponentSpec, hookimpl


@hookimpl
def dovetail_components() -> list[ComponentSpec]:
    return [
        ComponentSpec(
            kind="drafter",
            name="eagle3",
            target="dovetail_drafters.heads:Eagle3Drafter",
            api="1.0",
            options="dovetail_drafters.heads:Eagle3Options",
            summary="An EAGLE-3 head in the format of `speculators`, made for the model, which "
            "reads three of its layers",
        ),
        ComponentSpec(
            kind="drafter",
            name="model",
            target="dovetail_drafters.model:NamedModel",
            api="1.0",
            options="dovetail_drafters.model:ModelOptions",
            summary="A small model of the same vocabulary, which draws with the noise of the model "
            "that checks",
        ),
        ComponentSpec(
            kind="drafter",
            name="mtp",
            target="dovetail_drafters.heads:MtpDrafter",
            api="1.0",
            summary="The multi-token-prediction head that checkpoints of GLM-4.5, DeepSeek-V3, "
            "Qwen3-Next and Qwen3.5 carry",
        ),
        ComponentSpec(
            kind="drafter",
            name="ngram",
            target="dovetail_drafters.ngram:NgramDrafter",
            api="1.0",
            options="dovetail_drafters.ngram:NgramOptions",
            summary="Prompt lookup: continues as the request's own text did after its last few "
            "tokens",
        ),
        ComponentSpec(
            kind="drafter",
            name="suffix",
            target="dovetail_drafters.suffix:SuffixDrafter",
            api="1.0",
            options="dovetail_drafters.suffix:SuffixOptions",
            summary="Continues as the request's own text, or earlier answers to the same client, "
            "mostly did after the longest match",
        ),
    ]
