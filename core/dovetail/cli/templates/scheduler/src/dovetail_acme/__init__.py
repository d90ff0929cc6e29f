"""A scheduler, for Dovetail."""

from collections.abc import Iterable

from dovetail.api import ComponentSpec, hookimpl


@hookimpl
def dovetail_components() -> Iterable[ComponentSpec]:
    yield ComponentSpec(
        kind="scheduler",
        name="acme",
        target="dovetail_acme.policy:AcmeScheduler",
        api="1.0",
        options="dovetail_acme.policy:AcmeOptions",
        summary="Shortest prompt first, without starvation",
    )
