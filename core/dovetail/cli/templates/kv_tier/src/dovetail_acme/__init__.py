"""A KV tier, for Dovetail."""

from collections.abc import Iterable

from dovetail.api import ComponentSpec, hookimpl


@hookimpl
def dovetail_components() -> Iterable[ComponentSpec]:
    yield ComponentSpec(
        kind="kv_tier",
        name="acme",
        api="1.0",
        suite="1.1",
        target="dovetail_acme.tier:AcmeTier",
        options="dovetail_acme.tier:AcmeOptions",
        summary="Keeps compressed frames in memory",
    )
