"""`Binding`: the component that a suite tests, given as a declared name or a class, and its
options."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel

from dovetail.api.component import ComponentSpec, Kind
from dovetail.errors import DovetailError
from dovetail.registry.doctor.process import TIME_LIMIT_S
from dovetail.registry.resolved import options_of
from dovetail.testing.checks import Waiver

if TYPE_CHECKING:
    from dovetail.registry.registry import Registry
    from dovetail.registry.resolved import ResolvedComponent


class Binding:
    """The component under test, and how to construct it."""

    kind: ClassVar[Kind]
    # a subclass may set these; kinds may add some
    settings: ClassVar[frozenset[str]] = frozenset(
        {"component", "options", "suite_version", "time_limit_s", "waivers"}
    )

    # a name, "mine" or "distribution:mine", or a class; None: a base of other suites
    component: ClassVar[str | type[Any] | None] = None
    options: ClassVar[Mapping[str, Any]] = {}
    # id of a check -> its waiver, beside those that the component declares
    waivers: ClassVar[Mapping[str, Waiver]] = {}
    # checks of later versions don't count; None: as the component declares, of a class the newest
    suite_version: ClassVar[str | None] = None
    # for each check, as `OwnTime` counts; None: no limit
    time_limit_s: ClassVar[float | None] = TIME_LIMIT_S

    @cached_property
    def resolved(self) -> ResolvedComponent:
        """Find the component by its name. Raises `PluginError`; `DovetailError` if it is given as a
        class."""
        if not isinstance(self.component, str):
            told = "set it to the name of an installed component, or to a class"
            raise DovetailError(f"{type(self).__name__}.component is {self.component!r}: {told}")
        return installed(tuple(sys.path)).resolve(self.kind, self.component, self.options)

    @cached_property
    def component_class(self) -> type[Any]:
        """Return the component's class. Raises `PluginError` or `MissingExtraError` if it can't be
        loaded."""
        return self.component if isinstance(self.component, type) else self.resolved.load()

    @property
    def target(self) -> str:
        """ "package.module:Class", for worker processes to import."""
        if isinstance(self.component, type):
            return f"{self.component.__module__}:{self.component.__qualname__}"
        return self.resolved.spec.target

    @cached_property
    def options_model(self) -> type[BaseModel]:
        """Return the options model; for a class, the annotation of its `options`."""
        return (
            options_of(self.component)  # type: ignore[arg-type]  # a class is hashable
            if isinstance(self.component, type)
            else self.resolved.options_model()
        )

    def make_options(self, changed: Mapping[str, Any] | None = None) -> BaseModel:
        """Return `options`, with those of `changed` in their place, as the component's own model.
        Raises `ConfigError`, or pydantic's `ValidationError` for a bare class."""
        options = {**self.options, **(changed or {})}
        if not isinstance(self.component, str):
            return self.options_model.model_validate(options)
        if not changed:
            return self.resolved.validate_options()
        found = installed(tuple(sys.path)).resolve(self.kind, self.component, options)
        return found.validate_options()

    def make(self, context: Any) -> Any:
        """Make a new component, with `options`."""
        return self.component_class(self.make_options(), context)

    @property
    def capabilities(self) -> Any:
        """Capabilities of the component's class. Kinds whose options can change them construct a
        component instead."""
        return self.component_class.capabilities

    def declares(self, capability: str) -> bool:
        """Return True if the checks tied to `capability` apply: "declared" means a component with a
        name, others are fields of `capabilities`."""
        if capability == "declared":
            return isinstance(self.component, str)
        return bool(getattr(self.capabilities, capability))

    @cached_property
    def notes(self) -> list[str]:
        """Return lines for the report, with measurements that the checks don't judge."""
        return []

    def note(self, text: str) -> None:
        self.notes.append(text)


def declared(suite: type[Binding]) -> ComponentSpec | None:
    """Return the declaration of a suite's component; None for a class, and for a component that
    can't be found."""
    if not isinstance(suite.component, str):
        return None
    try:
        return installed(tuple(sys.path)).resolve(suite.kind, suite.component, {}).spec
    except DovetailError:
        return None


@cache
def installed(path: tuple[str, ...]) -> Registry:
    """Return the registry of the plugins on this `sys.path`; loaded once."""
    from dovetail.registry.registry import Registry

    return Registry.discover(enforce_require=False)
