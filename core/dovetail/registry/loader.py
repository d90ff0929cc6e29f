"""Discovery of installed plugins by their entry points, which imports nothing; importing one and
calling its hooks, inside a guard: any error becomes a `PluginFailure`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import metadata
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import pluggy
from packaging.requirements import InvalidRequirement
from packaging.utils import canonicalize_name

from dovetail.api.component import (
    ENTRY_POINT_GROUP,
    BundledModel,
    CommandSpec,
    ComponentSpec,
    QuantizationSpec,
    RouterSpec,
    RoutesSpec,
)
from dovetail.errors import DISTRIBUTION, PluginError
from dovetail.registry import hookspecs
from dovetail.registry.plugin import (
    NAMESPACE,
    FoundPlugin,
    LoadedPlugin,
    Phase,
    PluginFailure,
    PluginOrigin,
)
from dovetail.registry.requirements import PathState, header, parsed

HOOKS = tuple(name for name in dir(hookspecs) if name.startswith("dovetail_"))
# without its other names, at which pluggy would look for each plugin again
HOOKSPECS = ModuleType(hookspecs.__name__)
vars(HOOKSPECS).update({name: getattr(hookspecs, name) for name in HOOKS})
KEPT = 2**16  # characters of a plugin's output
T = TypeVar("T", ComponentSpec, CommandSpec, BundledModel, QuantizationSpec, RoutesSpec, RouterSpec)


class Findings(NamedTuple):
    """Plugins found and plugins that can't be used, sorted by distribution and entry point."""

    plugins: tuple[FoundPlugin, ...]
    failures: tuple[PluginFailure, ...]


def find_plugins() -> Findings:
    """Return all entry points in the group `dovetail.plugins`. A distribution whose metadata can't
    be read becomes a failure, and so does one named like the built-ins' namespace: a Dovetail from
    before its distribution was renamed. The others aren't affected."""
    plugins: list[FoundPlugin] = []
    failures: list[PluginFailure] = []
    for name, distribution in _distributions_with_plugins(failures).items():
        origin = PluginOrigin(name, "?", "?")
        try:
            origin = PluginOrigin(name, "?", str(header(distribution, "Version")))
            if name == NAMESPACE:
                remedy = f"pip uninstall {name} {DISTRIBUTION}, then install {DISTRIBUTION}"
                raise PluginError(
                    f"Dovetail's distribution is called {DISTRIBUTION}, and this may be an older "
                    f"one: {remedy}"
                )
            entry_points = set(distribution.entry_points.select(group=ENTRY_POINT_GROUP))
        except Exception as error:
            failures.append(PluginFailure(origin, "find", error))
            continue
        found, twice = _classify(origin, entry_points)
        plugins += found
        failures += twice
    return Findings(
        tuple(sorted(plugins, key=lambda p: p.origin)),
        tuple(sorted(failures, key=lambda f: f.origin)),
    )


def _distributions_with_plugins(failures: list[PluginFailure]) -> dict[str, metadata.Distribution]:
    """Return distributions by normalized name. Of one that is on the path twice (an old egg-info,
    say) the first counts, as in an import."""
    found: dict[str, metadata.Distribution] = {}
    for distribution in _mentioning_the_group(PathState.now()):
        try:
            name = header(distribution, "Name")
            if not name:
                raise PluginError("its metadata has no Name")
            found.setdefault(canonicalize_name(name), metadata.distribution(name))
        except Exception as error:
            failures.append(
                PluginFailure(
                    PluginOrigin(str(getattr(distribution, "_path", "?")), "?", "?"), "find", error
                )
            )
    return found


@lru_cache(maxsize=4)
def _mentioning_the_group(state: PathState) -> list[metadata.Distribution]:
    """Return the distributions whose raw metadata contains the group's name: parsing that of all
    distributions would be slow."""
    found = []
    for distribution in metadata.distributions():
        try:
            text = distribution.read_text("entry_points.txt") or ""
        except (OSError, UnicodeError):
            continue  # it can't be known whether it has plugins
        if ENTRY_POINT_GROUP in text:
            found.append(distribution)
    return found


def _classify(
    origin: PluginOrigin, entry_points: Iterable[metadata.EntryPoint]
) -> tuple[list[FoundPlugin], list[PluginFailure]]:
    """Split entry points into plugins and failures. Those that share a name are all refused, as an
    id must be unique."""
    by_name: dict[str, list[metadata.EntryPoint]] = {}
    for entry_point in entry_points:
        by_name.setdefault(entry_point.name, []).append(entry_point)
    found = []
    failures = []
    for name, same in by_name.items():
        here = PluginOrigin(origin.distribution, name, origin.version)
        if len(same) == 1:
            found.append(FoundPlugin(here, same[0]))
        else:
            values = " and ".join(sorted(entry_point.value for entry_point in same))
            failures.append(
                PluginFailure(
                    here,
                    "find",
                    PluginError(f"entry point {name!r} is defined more than once: {values}"),
                )
            )
    return found, failures


def load_plugin(found: FoundPlugin) -> LoadedPlugin | PluginFailure:
    """Import a plugin, register and call its hooks, and check every spec. Only `KeyboardInterrupt`
    gets out. Its output is kept."""
    phase: Phase = "import"
    with _captured_output() as output:
        try:
            module = found.entry_point.load()
            phase = "hooks"
            hooks = _hooks_of(module, found.origin.id)
            phase = "declare"
            components = _collect(
                hooks.dovetail_components, ComponentSpec, lambda spec: f"{spec.kind} {spec.name!r}"
            )
            _check_requirements(components)
            commands = _collect(
                hooks.dovetail_commands, CommandSpec, lambda spec: f"command {spec.name!r}"
            )
            models = _collect(
                hooks.dovetail_models, BundledModel, lambda model: f"model {model.name!r}"
            )
            quantizations = _collect(
                hooks.dovetail_quantizations,
                QuantizationSpec,
                lambda spec: f"quantization {spec.name!r}",
            )
            routes = _collect(
                hooks.dovetail_routes, RoutesSpec, lambda spec: f"routes {spec.name!r}"
            )
            routers = _collect(
                hooks.dovetail_routers, RouterSpec, lambda spec: f"router {spec.name!r}"
            )
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too
            return PluginFailure(found.origin, phase, error, "".join(output), found.package)
    return LoadedPlugin(
        found.origin,
        components,
        commands,
        models,
        quantizations,
        routes,
        routers,
        "".join(output),
    )


def _hooks_of(plugin: Any, plugin_id: str) -> Any:
    """Return the hooks of this plugin alone. A module's are looked up once. Raises what `_register`
    raises."""
    register = _register_once if isinstance(plugin, ModuleType) else _register
    return register(plugin, plugin_id)


def _register(module: Any, plugin_id: str) -> Any:
    """Return the hooks of this plugin alone. Raises pluggy's `PluginValidationError` for hooks or
    arguments that don't exist."""
    manager = pluggy.PluginManager("dovetail")
    manager.add_hookspecs(HOOKSPECS)
    manager.register(module, name=plugin_id)
    manager.check_pending()
    if not any(caller.spec is not None for caller in manager.get_hookcallers(module) or ()):
        unmarked = [name for name in HOOKS if hasattr(module, name)]
        hint = (
            f"; {', '.join(unmarked)} is there, but not marked with @hookimpl" if unmarked else ""
        )
        raise PluginError(
            f"it implements no hook, expected at least one of {', '.join(HOOKS)}{hint}"
        )
    return manager.hook


_register_once = lru_cache(maxsize=128)(_register)


def _collect(hook: Any, kind: type[T], describe: Callable[[T], str]) -> tuple[T, ...]:
    """Call a plugin's hook and return the results. Raises an error unless all are of the right type
    and none comes twice."""
    specs: dict[str, T] = {}
    for implementation in hook.get_hookimpls():
        returned = implementation.function()
        if isinstance(returned, str) or not isinstance(returned, Iterable):
            raise PluginError(
                f"{hook.name}() returned {returned!r}, expected an iterable of {kind.__name__}"
            )
        for spec in returned:
            if not isinstance(spec, kind):
                raise PluginError(f"{hook.name}() gave {spec!r}, expected a {kind.__name__}")
            if specs.setdefault(describe(spec), spec) is not spec:
                raise PluginError(f"{hook.name}() offers {describe(spec)} twice")
    return tuple(specs.values())


def _check_requirements(specs: Iterable[ComponentSpec]) -> None:
    for spec in specs:
        for text in spec.requires:
            try:
                requirement = parsed(text)
            except InvalidRequirement as error:
                raise PluginError(
                    f"ComponentSpec {spec.name!r}: requires has {text!r}, expected a requirement "
                    f"like 'torch>=2.11': {error}"
                ) from None
            if canonicalize_name(requirement.name) == NAMESPACE:
                raise PluginError(
                    f"ComponentSpec {spec.name!r}: requires has {text!r}, expected {DISTRIBUTION}, "
                    f"which is Dovetail's distribution"
                )


class _CapturedStream:
    """Captures the beginning of the output while a plugin loads; afterwards it forwards to the real
    stream, since a log handler may hold it."""

    def __init__(self, real: Any, kept: list[str]) -> None:
        self._real = real
        self._kept = kept
        self.capturing = True
        self._room = KEPT

    def write(self, text: str) -> int:
        if self.capturing:
            if self._room > 0:
                self._kept.append(text[: self._room])
                self._room -= len(text)
            return len(text)
        return int(self._real.write(text))

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@contextmanager
def _captured_output() -> Iterator[list[str]]:
    """Send Python's stdout and stderr to the list."""
    kept: list[str] = []
    real = sys.stdout, sys.stderr
    streams = _CapturedStream(sys.stdout, kept), _CapturedStream(sys.stderr, kept)
    sys.stdout, sys.stderr = streams
    try:
        yield kept
    finally:
        sys.stdout, sys.stderr = real
        for stream in streams:
            stream.capturing = False
