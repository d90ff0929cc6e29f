"""Adds components of other engines to a simulation, for comparison with their measurements."""

from __future__ import annotations

from dovetail.api.component import ComponentSpec, Kind
from dovetail.registry.plugin import LoadedPlugin, PluginOrigin
from dovetail.registry.registry import Registry

API = "1.0"  # of all kinds


def component(kind: Kind, name: str, target: str, options: str | None = None) -> ComponentSpec:
    """Return the declaration of a class and its options, by "package.module:Class"."""
    return ComponentSpec(
        kind=kind,
        name=name,
        target=target,
        api=API,
        options=options,
        summary="As another engine does it",
    )


def registry_with(*components: ComponentSpec) -> Registry:
    """Return the installed plugins, and these components beside them."""
    return Registry(
        [
            *Registry.discover().plugins,
            LoadedPlugin(PluginOrigin("bench", "policies", "0"), components),
        ]
    )
