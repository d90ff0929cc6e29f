"""A sampler, for Dovetail."""

from collections.abc import Iterable

from dovetail.api import ComponentSpec, hookimpl


@hookimpl
def dovetail_components() -> Iterable[ComponentSpec]:
    yield ComponentSpec(
        kind="sampler",
        name="acme",
        target="dovetail_acme.sampler:AcmeSampler",
        api="1.0",
        requires=("torch>=2.11",),
        summary="Row by row, in plain torch",
    )
