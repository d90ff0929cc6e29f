"""`Registry`: all installed components by name. The engine gets one as an argument; there is no
global registry.

`attention: auto` and `grammar: auto` are resolved here, too: built-ins only, in a fixed order.
Installing a plugin never activates it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dovetail.api.component import KINDS, Kind
from dovetail.base.where import Where, did_you_mean
from dovetail.errors import DISTRIBUTION, ConfigError, PluginError
from dovetail.registry.doctor.metadata import hidden_plugins
from dovetail.registry.loader import find_plugins, load_plugin
from dovetail.registry.plugin import DeniedPlugin, LoadedPlugin, PluginFailure
from dovetail.registry.requirements import missing_requirements
from dovetail.registry.resolved import (
    ResolvedCommand,
    ResolvedComponent,
    ResolvedQuantization,
    ResolvedRouter,
    ResolvedRoutes,
)
from dovetail.registry.selection import PluginSelection

__all__ = ["Registry", "ResolvedComponent"]

Offer = TypeVar("Offer", bound=ResolvedComponent | ResolvedCommand)
AUTO = "auto"
PREFERENCE: Mapping[Kind, tuple[str, ...]] = {  # best first
    "attention": (
        "triton",
        "flash_attn",
        "torch",
        "packed",
    ),  # as measured in docs/performance.md; the last is the only one for encoders
    "grammar": ("llguidance",),
}
EXAMPLES: Mapping[tuple[Kind, str], str] = {  # packages of examples/plugins, by former built-ins
    ("grammar", "xgrammar"): "dovetail-xgrammar",
}


class Registry:
    """The offers of all plugins, and the plugins that failed or were denied. Having a component
    here neither imports nor activates it."""

    def __init__(
        self,
        plugins: Iterable[LoadedPlugin] = (),
        failures: Iterable[PluginFailure] = (),
        denied: Iterable[DeniedPlugin] = (),
    ) -> None:
        """Make a registry. If two plugins of one distribution offer the same component, the first
        by name has it, and the other counts as failed."""
        loaded, twice = _without_repetitions(sorted(plugins, key=lambda plugin: plugin.origin))
        self.plugins: tuple[LoadedPlugin, ...] = loaded
        self.failures: tuple[PluginFailure, ...] = tuple(
            sorted((*failures, *twice), key=lambda failure: failure.origin)
        )
        self.denied: tuple[DeniedPlugin, ...] = tuple(
            sorted(denied, key=lambda plugin: plugin.origin)
        )
        self._missing: tuple[PluginFailure | DeniedPlugin, ...] = (*self.failures, *self.denied)
        components = [
            ResolvedComponent(spec, plugin.origin)
            for plugin in loaded
            for spec in plugin.components
        ]
        self._components = tuple(
            sorted(
                components, key=lambda c: (KINDS.index(c.spec.kind), c.spec.name, c.distribution)
            )
        )

    @classmethod
    def discover(
        cls,
        selection: PluginSelection | None = None,
        *,
        environ: Mapping[str, str] = os.environ,
        enforce_require: bool = True,
    ) -> Registry:
        """Find the installed plugins and load those that `selection`, overridden by
        `DOVETAIL_PLUGINS`, lets through.

        A plugin that fails is recorded and doesn't affect the others. Raises `ConfigError` if
        `require` isn't met and `enforce_require` is True.
        """
        selection = (selection or PluginSelection()).with_environment(environ)
        found, failures = find_plugins()
        denied = [
            DeniedPlugin(plugin.origin, why)
            for plugin in found
            if (why := selection.denial(plugin.origin))
        ]
        refused = {plugin.origin for plugin in denied}
        results = [load_plugin(plugin) for plugin in found if plugin.origin not in refused]
        loaded = [result for result in results if isinstance(result, LoadedPlugin)]
        failed = [result for result in results if isinstance(result, PluginFailure)]
        registry = cls(loaded, [*failures, *failed], denied)
        if enforce_require:
            registry.check_required(selection.require)
        return registry

    def check_required(self, require: Iterable[str]) -> None:
        """Raise `ConfigError` unless each requirement's distribution has plugins here, in a version
        that it allows, and none of them failed."""
        problems = [why for text in require if (why := self._unmet(Requirement(text)))]
        if problems:
            raise ConfigError("\n".join(f"plugins.require: {problem}" for problem in problems))

    def _unmet(self, requirement: Requirement) -> str | None:
        name = canonicalize_name(requirement.name)
        for trouble in self._missing:
            if trouble.origin.distribution == name:
                return f"{requirement}: {trouble}"
        version = next(
            (
                plugin.origin.version
                for plugin in self.plugins
                if plugin.origin.distribution == name
            ),
            None,
        )
        if version is None:
            return f"{requirement}: no plugin of that distribution is installed"
        if not requirement.specifier.contains(version, prereleases=True):
            return f"{requirement}: {version} is installed"
        return None

    def components(self, kind: Kind | None = None) -> tuple[ResolvedComponent, ...]:
        """Return all components, or those of one kind, sorted by kind, name and distribution."""
        return tuple(
            component for component in self._components if kind in (None, component.spec.kind)
        )

    def commands(self) -> tuple[ResolvedCommand, ...]:
        """Return the subcommands that plugins add, sorted by name and distribution."""
        commands = [
            ResolvedCommand(spec, plugin.origin)
            for plugin in self.plugins
            for spec in plugin.commands
        ]
        return tuple(sorted(commands, key=lambda c: (c.spec.name, c.origin)))

    def quantizations(self) -> tuple[ResolvedQuantization, ...]:
        """Return the ways of storing weights that plugins know, sorted by name and distribution."""
        known = [
            ResolvedQuantization(spec, plugin.origin)
            for plugin in self.plugins
            for spec in plugin.quantizations
        ]
        return tuple(sorted(known, key=lambda q: (q.spec.name, q.origin)))

    def routes(self) -> tuple[ResolvedRoutes, ...]:
        """Return the routes that plugins offer to the server, sorted by name and distribution."""
        known = [
            ResolvedRoutes(spec, plugin.origin) for plugin in self.plugins for spec in plugin.routes
        ]
        return tuple(sorted(known, key=lambda r: (r.spec.name, r.origin)))

    def routers(self) -> tuple[ResolvedRouter, ...]:
        """Return the routers of replicas that plugins offer to the lab, sorted by name and
        distribution."""
        known = [
            ResolvedRouter(spec, plugin.origin)
            for plugin in self.plugins
            for spec in plugin.routers
        ]
        return tuple(sorted(known, key=lambda r: (r.spec.name, r.origin)))

    def routes_named(self, name: str) -> ResolvedRoutes:
        """Return the routes "haiku" or "distribution:haiku". Raises `PluginError` if there are none
        or several of that name."""
        known = self.routes()
        matches = [routes for routes in known if name in (routes.spec.name, routes.qualified_name)]
        if len(matches) == 1:
            return matches[0]
        names = [each for routes in known for each in (routes.spec.name, routes.qualified_name)]
        if matches:
            raise PluginError(
                f"routes {name!r} are offered by "
                f"{' and '.join(routes.qualified_name for routes in matches)}: write the name in "
                f"full"
            )
        failed = "".join(f"\n  {failure}" for failure in self._missing)
        raise PluginError(
            f"unknown routes {name!r}{did_you_mean(name, names)}; installed: "
            f"{', '.join(routes.qualified_name for routes in known) or 'none'}{failed}"
        )

    def resolve(
        self,
        kind: Kind,
        name: str,
        options: Mapping[str, Any] | None = None,
        where: Where | None = None,
    ) -> ResolvedComponent:
        """Return the component of that name, "fcfs" or "distribution:fcfs", bound to the options
        from a config. A short name means the built-in, if there is one of that name.

        Raises `PluginError` if the name is unknown (listing the installed ones, and failed plugins
        that may have offered it) or ambiguous (listing all that it fits), or if the component is of
        another api version.
        """
        where = where or Where((kind,))
        if kind not in KINDS:
            raise PluginError(
                where.says(
                    f"unknown kind {kind!r}{did_you_mean(kind, KINDS)}; kinds are "
                    f"{', '.join(KINDS)}"
                )
            )
        matches = built_ins_first(
            [component for component in self.components(kind) if _matches(component, name)]
        )
        if not matches:
            raise PluginError(where.says(self._unknown(kind, name)))
        if len(matches) > 1:
            offers = " and ".join(
                f"{component.qualified_name} ({component.version})" for component in matches
            )
            raise PluginError(
                where.says(
                    f"{kind} {name!r} is offered more than once, by {offers}: write the one you "
                    f"mean in full"
                )
            )
        if problem := matches[0].api_problem():
            raise PluginError(where.says(problem))
        return ResolvedComponent(matches[0].spec, matches[0].origin, dict(options or {}), where)

    def needs_full_name(self, offer: ResolvedComponent | ResolvedCommand) -> bool:
        """Return True if the short name of a component or command means another one, or is
        ambiguous."""
        others = (
            self.commands()
            if isinstance(offer, ResolvedCommand)
            else self.components(offer.spec.kind)
        )
        return built_ins_first(
            [other for other in others if other.spec.name == offer.spec.name]
        ) != [offer]

    def _unknown(self, kind: Kind, name: str) -> str:
        installed = self.components(kind)
        names = [
            name
            for component in installed
            for name in (component.spec.name, component.qualified_name)
        ]
        lines = [f"unknown {kind} {name!r}{did_you_mean(name, names)}"]
        elsewhere = [
            component.spec.kind for component in self._components if _matches(component, name)
        ]
        if elsewhere:
            lines.append(f"  there is a component of that name, of kind {' and '.join(elsewhere)}")
        lines.append(
            f"  installed: "
            f"{', '.join(f'{c.spec.name} ({c.distribution} {c.version})' for c in installed) or f'no {kind} at all'}"
        )
        if (package := EXAMPLES.get((kind, name))) is not None:
            lines.append(
                f"  it is an example package: pip install ./examples/plugins/{package}"
                ", in a clone of Dovetail's repository"
            )
        suspects = list(self._suspects(name))
        if suspects:
            lines.append("  it may have been offered by a plugin that isn't there:")
            lines += [f"    {suspect}" for suspect in suspects]
        if not any(plugin.origin.built_in for plugin in self.plugins):
            lines.append(
                f"  not even the built-ins are there: is the distribution {DISTRIBUTION!r} "
                f"installed in this environment?"
            )
        return "\n".join(lines)

    def _suspects(self, name: str) -> Iterator[str]:
        """Yield the failed, denied and wrongly installed plugins that may offer a name; for a
        qualified name, those of its distribution."""
        distribution, colon, _ = name.rpartition(":")
        for plugin in self._missing:
            if not colon or plugin.origin.is_called(distribution):
                yield str(plugin)
        for finding in hidden_plugins():
            if not colon or finding.origin.is_called(distribution):
                called = finding.origin.distribution
                yield f"{called} {finding.origin.version}: {finding.what}; `dovetail plugins doctor {called}` says what to do"


def built_ins_first(offers: list[Offer]) -> list[Offer]:
    """Return the built-ins among components or commands of one name, or all if none is built in:
    installing a plugin never takes a name away."""
    return [offer for offer in offers if offer.origin.built_in] or offers


def _matches(component: ResolvedComponent, name: str) -> bool:
    distribution, colon, short = name.rpartition(":")
    return component.spec.name == short and (not colon or component.origin.is_called(distribution))


def _without_repetitions(
    plugins: list[LoadedPlugin],
) -> tuple[tuple[LoadedPlugin, ...], list[PluginFailure]]:
    """Return the plugins to keep, and a failure for each that offers a qualified name which an
    earlier plugin of its distribution offers."""
    owners: dict[tuple[str, str, str], LoadedPlugin] = {}
    kept = []
    failures = []
    for plugin in plugins:
        keys = {
            (plugin.origin.distribution, what, name): f"{what} {name!r}"
            for what, name in plugin.offers()
        }
        clash = next((key for key in keys if key in owners), None)
        if clash is None:
            owners |= dict.fromkeys(keys, plugin)
            kept.append(plugin)
        else:
            why = PluginError(
                f"{keys[clash]} is offered by {owners[clash].origin.id} of the same distribution "
                f"already"
            )
            failures.append(PluginFailure(plugin.origin, "declare", why, plugin.output))
    return tuple(kept), failures


def attention_candidates(
    registry: Registry,
    name: str = AUTO,
    options: Mapping[str, Any] | None = None,
    where: Where | None = None,
) -> tuple[ResolvedComponent, ...]:
    """Return the backends that an executor should consider, best first; it takes the first that has
    no reason against it.

    For "auto" these are the built-ins of `PREFERENCE` whose required packages are installed,
    perhaps none; for a name, that backend alone. Raises `PluginError` for a name that isn't
    available, `ConfigError` for options given to "auto".
    """
    where = where or Where(("attention",))
    if name != AUTO:
        return (registry.resolve("attention", name, options, where),)
    return tuple(
        component
        for component in _built_ins("attention", registry, options, where)
        if not missing_requirements(component.spec.requires)
    )


def chosen_grammar(
    registry: Registry,
    name: str = AUTO,
    options: Mapping[str, Any] | None = None,
    where: Where | None = None,
) -> ResolvedComponent | None:
    """Return the grammar backend that requests may ask for.

    For "auto" it is the built-in one, even if its required packages aren't installed: then
    `check_requires` names the pip line when a request asks. None if there is no such built-in.
    Raises as `attention_candidates` does.
    """
    where = where or Where(("grammar",))
    if name != AUTO:
        return registry.resolve("grammar", name, options, where)
    return next(iter(_built_ins("grammar", registry, options, where)), None)


def _built_ins(
    kind: Kind, registry: Registry, options: Mapping[str, Any] | None, where: Where
) -> list[ResolvedComponent]:
    """Return the built-ins that "auto" chooses from, best first, whether or not what they require
    is there."""
    if options:
        raise ConfigError(
            where.at(next(iter(options))).says(
                "auto takes no options; name the backend that they are for"
            )
        )
    offered = {
        component.spec.name: component
        for component in registry.components(kind)
        if component.origin.built_in
    }
    return [
        offered[name]
        for name in PREFERENCE[kind]
        if name in offered and offered[name].api_problem() is None
    ]
