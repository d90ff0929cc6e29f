"""Last come, first served, for Dovetail."""

from collections.abc import Iterable

from dovetail.api import ComponentSpec, hookimpl


@hookimpl
def dovetail_components() -> Iterable[ComponentSpec]:
    yield ComponentSpec(
        kind="scheduler",
        name="lcfs",
        target="dovetail_lcfs.policy:LCFS",
        api="1.0",
        summary="Last come, first served; preempts the oldest",
    )
