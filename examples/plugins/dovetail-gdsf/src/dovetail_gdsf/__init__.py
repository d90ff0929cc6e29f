"""Greedy-Dual-Size-Frequency, for Dovetail."""

from collections.abc import Iterable

from dovetail.api import ComponentSpec, hookimpl


@hookimpl
def dovetail_components() -> Iterable[ComponentSpec]:
    yield ComponentSpec(
        kind="kv_cache",
        name="gdsf",
        api="1.0",
        target="dovetail_gdsf.manager:GDSF",
        options="dovetail.api.prefix_cache:PrefixOptions",
        summary="Prefix caching; what is found rarely for its size is evicted first",
    )
