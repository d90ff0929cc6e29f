"""An attention backend, for Dovetail."""

from collections.abc import Iterable

from dovetail.api import ComponentSpec, hookimpl


@hookimpl
def dovetail_components() -> Iterable[ComponentSpec]:
    yield ComponentSpec(
        kind="attention",
        api="1.0",
        name="acme",
        target="dovetail_acme.backend:AcmeAttention",
        requires=("torch>=2.11",),
        summary="Row by row, in plain torch",
    )
