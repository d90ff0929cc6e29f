"""A plugin at each stage: found by its metadata, loaded, or failed."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Literal

from packaging.utils import canonicalize_name

from dovetail.api.component import BundledModel, CommandSpec, ComponentSpec
from dovetail.errors import DISTRIBUTION, describe

NAMESPACE = "dovetail"  # how names say "the built-ins", as in `dovetail:fcfs`; pip calls their distribution `DISTRIBUTION`

Phase = Literal["find", "import", "hooks", "declare"]


@dataclass(frozen=True, slots=True, order=True)
class PluginOrigin:
    """Whose plugin it is. `distribution` is the normalized name (lower case, "-")."""

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
        """What stands before the ":" of a full name."""
        return NAMESPACE if self.built_in else self.distribution

    def is_called(self, name: str) -> bool:
        """Whether a name before a ":" means this distribution. The built-ins answer to their distribution's name too."""
        return canonicalize_name(name) in (self.namespace, self.distribution)

    def __str__(self) -> str:
        return f"{self.id} {self.version}"


@dataclass(frozen=True, slots=True)
class FoundPlugin:
    """Known by metadata alone; nothing of it is imported."""

    origin: PluginOrigin
    entry_point: EntryPoint


@dataclass(frozen=True, slots=True)
class LoadedPlugin:
    """Imported and checked, with all that it declares. `output`: what it printed meanwhile."""

    origin: PluginOrigin
    components: tuple[ComponentSpec, ...] = ()
    commands: tuple[CommandSpec, ...] = ()
    models: tuple[BundledModel, ...] = ()
    output: str = ""


@dataclass(frozen=True, slots=True)
class PluginFailure:
    """A plugin that isn't there, and why. `phase`: "find" (its metadata), "import", "hooks" (which it has), "declare" (what they return)."""

    origin: PluginOrigin
    phase: Phase
    error: BaseException
    output: str = ""

    @property
    def reason(self) -> str:
        """One line."""
        return " ".join(describe(self.error).split())

    def __str__(self) -> str:
        return f"{self.origin} failed ({self.phase}): {self.reason}"


@dataclass(frozen=True, slots=True)
class DeniedPlugin:
    """A plugin that was found and, as the selection says, not imported."""

    origin: PluginOrigin
    reason: str

    def __str__(self) -> str:
        return f"{self.origin} is {self.reason}"
