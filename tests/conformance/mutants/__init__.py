"""Components that are broken on purpose, a module a kind: proof that the checks can fail.

    @mutant(caught_by="scheduler.budget")
    class Overspends(FCFS):
        "Takes tokens that the step doesn't have."

A mutant is mostly a built-in with one thing broken, so that whatever else a check looks at is
right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from dovetail import api
from dovetail.api.component import Kind
from dovetail.registry.resolved import BASE_CLASSES
from dovetail.testing.suite import Suite
from dovetail.testing.suites import suite_for

T = TypeVar("T", bound=type)


@dataclass(frozen=True)
class Mutant:
    """`error`: what its check raises; an `AssertionError`, unless the component itself raises in
    it. `soon`: caught sooner than others of its check, so that the quick profile tries this one.
    `settings`: of its suite."""

    component: type
    caught_by: str  # a check's id
    error: type[Exception] = AssertionError
    options: Mapping[str, Any] = field(default_factory=dict)
    soon: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> Kind:
        return next(
            kind
            for kind, base in BASE_CLASSES.items()
            if issubclass(self.component, getattr(api, base))
        )

    @property
    def suite(self) -> type[Suite]:
        return type(
            self.component.__name__,
            (suite_for(self.kind),),
            {"component": self.component, "options": self.options, **self.settings},
        )

    def __repr__(self) -> str:
        return f"{self.kind}-{self.component.__name__}"


_MUTANTS: list[Mutant] = []


def mutant(
    caught_by: str,
    *,
    error: type[Exception] = AssertionError,
    options: Mapping[str, Any] | None = None,
    soon: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> Callable[[T], T]:
    """Register a broken component, with the one check that must catch it."""

    def register(component: T) -> T:
        _MUTANTS.append(Mutant(component, caught_by, error, options or {}, soon, settings or {}))
        return component

    return register


def mutants() -> Iterator[Mutant]:
    """All that the modules beside this one register."""
    _load_all()
    yield from _MUTANTS


@cache
def _load_all() -> None:
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        import_module(f"{__name__}.{path.stem}")
