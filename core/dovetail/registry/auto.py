"""Resolution of `attention: auto` and `grammar: auto`: built-ins only, in a fixed order. Installing a plugin never activates it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.api.component import Kind
from dovetail.errors import ConfigError
from dovetail.registry.registry import Registry
from dovetail.registry.requirements import missing_requirements
from dovetail.registry.resolved import ResolvedComponent
from dovetail.where import Where

AUTO = "auto"
PREFERENCE: Mapping[Kind, tuple[str, ...]] = {  # best first
    "attention": ("triton", "flash_attn", "torch"),  # as measured in docs/performance.md
    "grammar": ("llguidance", "xgrammar"),  # the first is ready at once, whatever the schema
}


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
    return tuple(component for component in _built_ins("attention", registry, options, where) if not missing_requirements(component.spec.requires))


def chosen_grammar(
    registry: Registry, name: str = AUTO, options: Mapping[str, Any] | None = None, where: Where | None = None
) -> ResolvedComponent | None:
    """Return the grammar backend that requests may ask for.

    For "auto" it is the first built-in of `PREFERENCE` whose required packages are installed; if none is, the very first, so that `check_requires`
    names the pip line when a request asks; None if there is no such built-in. Raises as `attention_candidates` does.
    """
    where = where or Where(("grammar",))
    if name != AUTO:
        return registry.resolve("grammar", name, options, where)
    built_ins = _built_ins("grammar", registry, options, where)
    usable = (component for component in built_ins if not missing_requirements(component.spec.requires))
    return next(usable, built_ins[0] if built_ins else None)


def _built_ins(kind: Kind, registry: Registry, options: Mapping[str, Any] | None, where: Where) -> list[ResolvedComponent]:
    """Return the built-ins that "auto" chooses from, best first, whether or not what they require is there."""
    if options:
        raise ConfigError(where.at(next(iter(options))).says("auto takes no options; name the backend that they are for"))
    offered = {component.spec.name: component for component in registry.components(kind) if component.origin.built_in}
    return [offered[name] for name in PREFERENCE[kind] if name in offered and offered[name].api_problem() is None]
