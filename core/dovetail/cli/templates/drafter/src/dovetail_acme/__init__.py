"""A drafter, for Dovetail."""

from collections.abc import Iterable

from dovetail.api import ComponentSpec, hookimpl


@hookimpl
def dovetail_components() -> Iterable[ComponentSpec]:
    yield ComponentSpec(
        kind="drafter",
        name="acme",
        target="dovetail_acme.drafter:AcmeDrafter",
        api="1.0",
        options="dovetail_acme.drafter:AcmeOptions",
        summary="Continues as the request's own text did before",
    )
