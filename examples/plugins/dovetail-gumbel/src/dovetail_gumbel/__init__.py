"""The Gumbel top-k sampler, for Dovetail."""

from collections.abc import Iterable

from dovetail.api import ComponentSpec, hookimpl


@hookimpl
def dovetail_components() -> Iterable[ComponentSpec]:
    yield ComponentSpec(
        kind="sampler",
        name="gumbel",
        target="dovetail_gumbel.sampler:GumbelSampler",
        api="1.0",
        summary="Gumbel top-k: exact samples, without replacement if asked",
        requires=("torch>=2.11",),
    )
