"""A KV-cache manager, for Dovetail."""

from collections.abc import Iterable

from dovetail.api import ComponentSpec, hookimpl


@hookimpl
def dovetail_components() -> Iterable[ComponentSpec]:
    yield ComponentSpec(
        kind="kv_cache",
        name="acme",
        target="dovetail_acme.manager:AcmeKVCache",
        api="1.0",
        summary="Every request has blocks of its own",
    )
