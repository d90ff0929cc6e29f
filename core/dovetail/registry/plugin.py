"""States of a plugin: found, loaded, failed, denied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Literal

from packaging.utils import canonicalize_name

from dovetail.api.component import (
    BundledModel,
    CommandSpec,
    ComponentSpec,
    QuantizationSpec,
    RouterSpec,
    RoutesSpec,
)
from dovetail.errors import DISTRIBUTION, describe_raised

# of the built-ins, as in `dovetail:fcfs`; their distribution is called `DISTRIBUTION`
NAMESPACE = "dovetail"

Phase = Literal["find", "import", "hooks", "declare"]


@dataclass(frozen=True, slots=True, order=True)
class PluginOrigin:
    """The distribution and entry point of a plugin. `distribution` is the normalized name (lower
    case, "-")."""

    distribution: str
    entry_point: str
    version: str

    @property
    def id(self) -> str:
        return f"{self.distribution}/{self.entry_point}"

    @property
    def built_in(self) -> bool:
        return self.distribution == DISTRIBUTION

    @property
    def namespace(self) -> str:
        """The part of a full name before the ":"."""
        return NAMESPACE if self.built_in else self.distribution

    def in_full(self, name: str) -> str:
        """Return the full name of what it offers, "distribution:name"; for a built-in
        "dovetail:name"."""
        return f"{self.namespace}:{name}"

    def is_called(self, name: str) -> bool:
        """Return True if a name before a ":" means this distribution. The built-ins also have their
        distribution's name."""
        return canonicalize_name(name) in (self.namespace, self.distribution)

    def __str__(self) -> str:
        return f"{self.id} {self.version}"


@dataclass(frozen=True, slots=True)
class FoundPlugin:
    """A plugin known by metadata alone; nothing of it is imported."""

    origin: PluginOrigin
    entry_point: EntryPoint

    @property
    def package(self) -> str:
        """The top-level package of its module."""
        return self.entry_point.value.partition(":")[0].partition(".")[0].strip()


@dataclass(frozen=True, slots=True)
class LoadedPlugin:
    """A plugin that was imported and checked, with all its declarations. `output`: text that it
    printed meanwhile."""

    origin: PluginOrigin
    components: tuple[ComponentSpec, ...] = ()
    commands: tuple[CommandSpec, ...] = ()
    models: tuple[BundledModel, ...] = ()
    quantizations: tuple[QuantizationSpec, ...] = ()
    routes: tuple[RoutesSpec, ...] = ()
    routers: tuple[RouterSpec, ...] = ()
    output: str = ""

    def offers(self) -> Iterator[tuple[str, str]]:
        """Yield (what, name) of each declaration: ("scheduler", "fcfs")."""
        yield from ((spec.kind, spec.name) for spec in self.components)
        yield from (("command", spec.name) for spec in self.commands)
        yield from (("bundled model", model.name) for model in self.models)
        yield from (("quantization", spec.name) for spec in self.quantizations)
        yield from (("routes", spec.name) for spec in self.routes)
        yield from (("router", spec.name) for spec in self.routers)


@dataclass(frozen=True, slots=True)
class PluginFailure:
    """A plugin that can't be used, and why. `phase`: "find" (reading its metadata), "import",
    "hooks" (checking their names), "declare" (calling them). `package`: the top-level package of
    its module, if that is known."""

    origin: PluginOrigin
    phase: Phase
    error: BaseException
    output: str = ""
    package: str = ""

    @property
    def reason(self) -> str:
        """The error in one line, with the plugin's file and line that raised it."""
        return " ".join(describe_raised(self.error, self.package).split())

    def __str__(self) -> str:
        return f"{self.origin} failed ({self.phase}): {self.reason}"


@dataclass(frozen=True, slots=True)
class DeniedPlugin:
    """A plugin that was found but, because of the selection, not imported."""

    origin: PluginOrigin
    reason: str

    def __str__(self) -> str:
        return f"{self.origin} is {self.reason}"
