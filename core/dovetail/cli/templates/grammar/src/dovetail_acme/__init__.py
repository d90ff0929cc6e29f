"""A grammar backend, for Dovetail."""

from collections.abc import Iterable

from dovetail.api import ComponentSpec, hookimpl


@hookimpl
def dovetail_components() -> Iterable[ComponentSpec]:
    yield ComponentSpec(
        kind="grammar",
        name="acme",
        target="dovetail_acme.backend:AcmeBackend",
        api="1.0",
        summary="Holds answers to one of several texts, by looking at what each of them goes on with",
    )
