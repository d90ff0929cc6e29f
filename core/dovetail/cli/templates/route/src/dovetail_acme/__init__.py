"""A route of the server, for Dovetail."""

from collections.abc import Iterable

from dovetail.api import RoutesSpec, hookimpl


@hookimpl
def dovetail_routes() -> Iterable[RoutesSpec]:
    yield RoutesSpec(
        name="acme",
        target="dovetail_acme.routes:make",
        summary="POST /acme: a summary of a text",
    )
