"""An executor, for Dovetail."""

from collections.abc import Iterable

from dovetail.api import ComponentSpec, hookimpl


@hookimpl
def dovetail_components() -> Iterable[ComponentSpec]:
    yield ComponentSpec(
        kind="executor",
        name="acme",
        target="dovetail_acme.executor:AcmeExecutor",
        api="1.0",
        options="dovetail_acme.executor:AcmeOptions",
        summary="No model: each request is answered with its own prompt",
    )
