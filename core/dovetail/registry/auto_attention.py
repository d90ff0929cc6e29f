"""The choice of `attention: auto`: built-in backends only, in a fixed order. Installing a plugin never makes it active."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.errors import ConfigError
from dovetail.registry.registry import Registry
from dovetail.registry.requirements import missing_requirements
from dovetail.registry.resolved import ResolvedComponent
from dovetail.where import Where

AUTO = "auto"
PREFERENCE = ("triton", "flash_attn", "torch")  # best first, as measured in docs/performance.md


def attention_candidates(
    registry: Registry, name: str = AUTO, options: Mapping[str, Any] | None = None, where: Where | None = None
) -> tuple[ResolvedComponent, ...]:
    """Return the backends that an executor should consider, best first; it takes the first that has no reason against it.

    For "auto" these are the built-ins of `PREFERENCE` whose required packages are installed, perhaps none; for a name, that backend alone.
    Raises `PluginError` for a name that isn't available, `ConfigError` for options given to "auto".
    """
    where = where or Where(("attention",))
    if name != AUTO:
        return (registry.resolve("attention", name, options, where),)
    if options:
        raise ConfigError(where.at(next(iter(options))).says("auto takes no options; name the backend that they are for"))
    built_in = {c.spec.name: c for c in registry.components("attention") if c.origin.built_in}
    there = [built_in[name] for name in PREFERENCE if name in built_in and not missing_requirements(built_in[name].spec.requires)]
    return tuple(component for component in there if component.api_problem() is None)
