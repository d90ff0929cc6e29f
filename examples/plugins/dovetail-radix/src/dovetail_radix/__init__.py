"""A radix tree of cached prefixes, for Dovetail."""

from collections.abc import Iterable

from dovetail.api import ComponentSpec, hookimpl


@hookimpl
def dovetail_components() -> Iterable[ComponentSpec]:
    yield ComponentSpec(
        kind="kv_cache",
        name="radix",
        api="1.0",
        target="dovetail_radix.manager:RadixCache",
        summary="Prefixes in a tree of blocks; the leaf used longest ago is evicted first",
    )
