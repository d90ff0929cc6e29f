"""Built-in KV-cache managers."""

from __future__ import annotations

from dovetail.api.component import ComponentSpec, hookimpl


@hookimpl
def dovetail_components() -> list[ComponentSpec]:
    return [
        ComponentSpec(
            kind="kv_cache",
            name="prefix",
            api="1.0",
            target="dovetail.api.prefix_cache:PrefixCache",
            options="dovetail.api.prefix_cache:PrefixOptions",
            summary="Prefix caching by hash chains of tokens, with LRU eviction",
        )
    ]
