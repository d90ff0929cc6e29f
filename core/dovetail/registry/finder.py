"""Discovery of installed plugins by their entry points; imports nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import metadata
from typing import NamedTuple

from packaging.utils import canonicalize_name

from dovetail.api.component import ENTRY_POINT_GROUP
from dovetail.errors import DISTRIBUTION, PluginError
from dovetail.registry.plugin import NAMESPACE, FoundPlugin, PluginFailure, PluginOrigin


class Findings(NamedTuple):
    """Plugins found and plugins that can't be used, sorted by distribution and entry point."""

    plugins: tuple[FoundPlugin, ...]
    failures: tuple[PluginFailure, ...]


def find_plugins() -> Findings:
    """Return all entry points in the group `dovetail.plugins`. A distribution whose metadata can't be read becomes a failure, and so does one named
    like the built-ins' namespace: a Dovetail from before its distribution was renamed. The others aren't affected."""
    plugins: list[FoundPlugin] = []
    failures: list[PluginFailure] = []
    for name, distribution in _distributions_with_plugins(failures).items():
        origin = PluginOrigin(name, "?", "?")
        try:
            origin = PluginOrigin(name, "?", str(distribution.version))
            if name == NAMESPACE:
                remedy = f"pip uninstall {name} {DISTRIBUTION}, then install {DISTRIBUTION}"
                raise PluginError(f"Dovetail's distribution is called {DISTRIBUTION}, and this may be an older one: {remedy}")
            entry_points = set(distribution.entry_points.select(group=ENTRY_POINT_GROUP))
        except Exception as error:
            failures.append(PluginFailure(origin, "find", error))
            continue
        found, twice = _classify(origin, entry_points)
        plugins += found
        failures += twice
    return Findings(tuple(sorted(plugins, key=lambda p: p.origin)), tuple(sorted(failures, key=lambda f: f.origin)))


def _distributions_with_plugins(failures: list[PluginFailure]) -> dict[str, metadata.Distribution]:
    """Return distributions by normalized name. Of one that is on the path twice (an old egg-info, say) the first counts, as in an import."""
    found: dict[str, metadata.Distribution] = {}
    for distribution in _mentioning_the_group():
        try:
            name = distribution.metadata["Name"]
            if not name:
                raise PluginError("its metadata has no Name")
            found.setdefault(canonicalize_name(name), metadata.distribution(name))
        except Exception as error:
            failures.append(PluginFailure(PluginOrigin(str(getattr(distribution, "_path", "?")), "?", "?"), "find", error))
    return found


def _mentioning_the_group() -> Iterator[metadata.Distribution]:
    """Yield the distributions whose raw metadata contains the group's name: parsing that of all distributions would be slow."""
    for distribution in metadata.distributions():
        try:
            text = distribution.read_text("entry_points.txt") or ""
        except (OSError, UnicodeError):
            continue  # it can't be known whether it has plugins
        if ENTRY_POINT_GROUP in text:
            yield distribution


def _classify(origin: PluginOrigin, entry_points: Iterable[metadata.EntryPoint]) -> tuple[list[FoundPlugin], list[PluginFailure]]:
    """Split entry points into plugins and failures. Those that share a name are all refused, as an id must be unique."""
    by_name: dict[str, list[metadata.EntryPoint]] = {}
    for entry_point in entry_points:
        by_name.setdefault(entry_point.name, []).append(entry_point)
    found, failures = [], []
    for name, same in by_name.items():
        here = PluginOrigin(origin.distribution, name, origin.version)
        if len(same) == 1:
            found.append(FoundPlugin(here, same[0]))
        else:
            values = " and ".join(sorted(entry_point.value for entry_point in same))
            failures.append(PluginFailure(here, "find", PluginError(f"entry point {name!r} is defined more than once: {values}")))
    return found, failures
