"""Built-in KV tiers."""

from __future__ import annotations

from dovetail.api.component import ComponentSpec, hookimpl


@hookimpl
def dovetail_components() -> list[ComponentSpec]:
    return [
        ComponentSpec(
            kind="kv_tier",
            name="disk",
            api="1.0",
            target="dovetail_kv_tiers.disk:DiskTier",
            options="dovetail_kv_tiers.disk:DiskOptions",
            summary="Keeps K and V in files of a folder, within a size, across restarts",
        ),
    ]
