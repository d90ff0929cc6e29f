"""A router of replicas, for Dovetail's lab."""

from collections.abc import Iterable

from dovetail.api import RouterSpec, hookimpl


@hookimpl
def dovetail_routers() -> Iterable[RouterSpec]:
    yield RouterSpec(
        name="acme",
        target="dovetail_acme.router:AcmeRouter",
        summary="A replica for each client",
    )
