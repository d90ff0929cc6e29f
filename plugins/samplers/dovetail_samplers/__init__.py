"""The built-in sampler, `default`: every sampling parameter, with counter-based noise."""

from __future__ import annotations

from collections.abc import Iterable

from dovetail.api.component import ComponentSpec, hookimpl


@hookimpl
def dovetail_components() -> Iterable[ComponentSpec]:
    yield ComponentSpec(
        kind="sampler",
        name="default",
        target="dovetail_samplers.default:DefaultSampler",
        api="0.2",
        summary="greedy, temperature, top-k, top-p, min-p, penalties, bans, logprobs; a seed fixes the tokens",
        requires=("torch>=2.11",),
    )
