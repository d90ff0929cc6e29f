"""Importing one plugin and calling its hooks, inside a guard: any error becomes a `PluginFailure`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pluggy
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from dovetail.api.component import BundledModel, CommandSpec, ComponentSpec, QuantizationSpec
from dovetail.errors import DISTRIBUTION, PluginError
from dovetail.registry import hookspecs
from dovetail.registry.plugin import NAMESPACE, FoundPlugin, LoadedPlugin, Phase, PluginFailure

KEPT = 2**16  # characters of a plugin's output

T = TypeVar("T", ComponentSpec, CommandSpec, BundledModel, QuantizationSpec)


def load_plugin(found: FoundPlugin) -> LoadedPlugin | PluginFailure:
    """Import a plugin, register and call its hooks, and check every spec. Only `KeyboardInterrupt` gets out. Its output is kept."""
    phase: Phase = "import"
    with _captured_output() as output:
        try:
            module = found.entry_point.load()
            phase = "hooks"
            hooks = _register(module, found.origin.id)
            phase = "declare"
            components = _collect(hooks.dovetail_components, ComponentSpec, lambda spec: f"{spec.kind} {spec.name!r}")
            _check_requirements(components)
            commands = _collect(hooks.dovetail_commands, CommandSpec, lambda spec: f"command {spec.name!r}")
            models = _collect(hooks.dovetail_models, BundledModel, lambda model: f"model {model.name!r}")
            quantizations = _collect(hooks.dovetail_quantizations, QuantizationSpec, lambda spec: f"quantization {spec.name!r}")
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too
            return PluginFailure(found.origin, phase, error, "".join(output), found.package)
    return LoadedPlugin(found.origin, components, commands, models, quantizations, "".join(output))


def _register(module: Any, plugin_id: str) -> Any:
    """Return the hooks of this plugin alone. Raises pluggy's `PluginValidationError` for hooks or arguments that don't exist."""
    manager = pluggy.PluginManager("dovetail")
    manager.add_hookspecs(hookspecs)
    manager.register(module, name=plugin_id)
    manager.check_pending()
    if not any(caller.spec is not None for caller in manager.get_hookcallers(module) or ()):
        names = [name for name in dir(hookspecs) if name.startswith("dovetail_")]
        unmarked = [name for name in names if hasattr(module, name)]
        hint = f"; {', '.join(unmarked)} is there, but not marked with @hookimpl" if unmarked else ""
        raise PluginError(f"it implements no hook, expected at least one of {', '.join(names)}{hint}")
    return manager.hook


def _collect(hook: Any, kind: type[T], describe: Callable[[T], str]) -> tuple[T, ...]:
    """Call a plugin's hook and return the results. Raises an error unless all are of the right type and none comes twice."""
    specs: dict[str, T] = {}
    for implementation in hook.get_hookimpls():
        returned = implementation.function()
        if isinstance(returned, str) or not isinstance(returned, Iterable):
            raise PluginError(f"{hook.name}() returned {returned!r}, expected an iterable of {kind.__name__}")
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
                requirement = Requirement(text)
            except InvalidRequirement as error:
                raise PluginError(f"ComponentSpec {spec.name!r}: requires has {text!r}, expected a requirement like 'torch>=2.11': {error}") from None
            if canonicalize_name(requirement.name) == NAMESPACE:
                raise PluginError(f"ComponentSpec {spec.name!r}: requires has {text!r}, expected {DISTRIBUTION}, which is Dovetail's distribution")


class _CapturedStream:
    """Captures the beginning of the output while a plugin loads; afterwards it forwards to the real stream, since a log handler may hold it."""

    def __init__(self, real: Any, kept: list[str]) -> None:
        self._real, self._kept, self.capturing = real, kept, True
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
