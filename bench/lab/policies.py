"""Adds policies of other engines to a simulation, for comparison with their measurements."""

from __future__ import annotations

from dovetail.api.component import ComponentSpec
from dovetail.registry.plugin import LoadedPlugin, PluginOrigin
from dovetail.registry.registry import Registry

API = "1.0"  # of schedulers


def registry_with(name: str, target: str, options: str | None = None) -> Registry:
    """Return the installed plugins, and beside them the scheduler `name`, a class and its options
    by "package.module:Class"."""
    spec = ComponentSpec(
        kind="scheduler",
        name=name,
        target=target,
        api=API,
        options=options,
        summary="As another engine does it",
    )
    return Registry(
        [
            *Registry.discover().plugins,
            LoadedPlugin(PluginOrigin("bench", "policies", "0"), (spec,)),
        ]
    )
