"""An observer, for Dovetail."""

from collections.abc import Iterable

from dovetail.api import ComponentSpec, hookimpl


@hookimpl
def dovetail_components() -> Iterable[ComponentSpec]:
    yield ComponentSpec(
        kind="observer",
        name="acme",
        api="1.0",
        target="dovetail_acme.observer:AcmeObserver",
        options="dovetail_acme.observer:AcmeOptions",
        summary="Logs the requests that took long",
    )
