"""Built-in sampler `default`: all sampling parameters, with counter-based noise."""

from __future__ import annotations

from collections.abc import Iterable

from dovetail.api.component import ComponentSpec, hookimpl


@hookimpl
def dovetail_components() -> Iterable[ComponentSpec]:
    yield ComponentSpec(
        kind="sampler",
        name="default",
        target="dovetail_samplers.default:DefaultSampler",
        api="1.0",
        summary="greedy, temperature, top-k, top-p, min-p, penalties, bans, logprobs; reproducible "
        "by seed",
        requires=("torch>=2.11",),
    )
