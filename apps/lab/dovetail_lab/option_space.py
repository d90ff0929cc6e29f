"""The search space of a policy's options: ranges from the constraints of its pydantic model, or
given by the user."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dovetail.errors import ConfigError, shown
from dovetail_lab.nearest import suggest

if TYPE_CHECKING:
    import optuna

WIDE = 100.0  # ratio of a range's ends from which it is searched on a log scale
SMALLEST = 1e-4  # of the highest value: the lowest one of a range that excludes zero
_LEAST = math.nextafter(0.0, 1.0)  # low end of a float that must be more than 0


@dataclass(frozen=True, slots=True)
class Choice:
    """A categorical option."""

    name: str
    values: tuple[Any, ...]

    def suggest(self, trial: optuna.Trial) -> Any:
        return trial.suggest_categorical(self.name, self.values)


@dataclass(frozen=True, slots=True)
class Range:
    """An option that is a number from `low` to `high`."""

    name: str
    low: float
    high: float
    whole: bool

    def suggest(self, trial: optuna.Trial) -> Any:
        log = self.low > 0 and self.high / self.low >= WIDE
        if self.whole:
            return trial.suggest_int(self.name, int(self.low), int(self.high), log=log)
        return trial.suggest_float(self.name, self.low, self.high, log=log)


Dimension = Choice | Range


def parse_ranges(texts: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Parse ranges `name=a..b`. Raises `ConfigError` unless a and b are finite, a < b, and names are
    unique."""
    found: dict[str, tuple[float, float]] = {}
    for text in texts:
        name, _, ends = (part.strip() for part in text.partition("="))
        low, _, high = ends.partition("..")
        try:
            numbers = float(low), float(high)
        except ValueError:
            numbers = math.nan, math.nan
        if not name or not -math.inf < numbers[0] < numbers[1] < math.inf:
            raise ConfigError(
                f"--range: expected NAME=LOW..HIGH such as quantum=16..256, got {shown(text)}"
            )
        if name in found:
            raise ConfigError(f"--range: {name} is given twice")
        found[name] = numbers
    return found


def space_of(
    model: type[BaseModel], ranges: Mapping[str, tuple[float, float]]
) -> tuple[list[Dimension], list[str]]:
    """Return the dimensions of a policy's options, and the names of those without bounds, which
    aren't searched.

    Raises `ConfigError` for a range of an unknown option, of one that isn't a number, or beyond its
    bounds, and if nothing is left to search.
    """
    fields = model.model_fields
    for name in ranges:
        if name not in fields:
            raise ConfigError(
                f"--range: the policy has no option {shown(name)}{suggest(name, fields)}"
            )
    space = {name: _dimension(name, field, ranges.get(name)) for name, field in fields.items()}
    found = [dimension for dimension in space.values() if dimension is not None]
    unbounded = [name for name, dimension in space.items() if dimension is None]
    if not found:
        needed = ", ".join(unbounded)
        raise ConfigError(
            f"nothing to search: options without bounds need --range NAME=LOW..HIGH: {needed}"
            if needed
            else "nothing to search: the policy has no options"
        )
    return found, unbounded


def _dimension(name: str, field: FieldInfo, given: tuple[float, float] | None) -> Dimension | None:
    kind, bounds = _resolved(field.annotation, field.metadata)
    if kind not in (int, float):
        if given is not None:
            raise ConfigError(f"--range: {name} isn't a number")
        values = (False, True) if kind is bool else get_args(kind)
        return Choice(name, values) if kind is bool or get_origin(kind) is Literal else None
    whole = kind is int
    low, high = _ends(bounds, whole)
    if given is not None:
        if whole and not all(end.is_integer() for end in given):
            raise ConfigError(f"--range: {name} takes whole numbers")
        if given[0] < low or given[1] > high:
            raise ConfigError(f"--range: {name} must be from {low:g} to {high:g}")
        low, high = given
    if not -math.inf < low < high < math.inf:
        return None
    return Range(name, max(low, SMALLEST * high) if low == _LEAST else low, high, whole)


def _ends(bounds: Sequence[Any], whole: bool) -> tuple[float, float]:
    """Return the lowest and highest value that the constraints allow."""

    def limits(name: str) -> list[float]:
        return [float(one) for bound in bounds if (one := getattr(bound, name, None)) is not None]

    def next_to(value: float, to: float) -> float:
        return value + math.copysign(1, to) if whole else math.nextafter(value, to)

    low = max([-math.inf, *limits("ge"), *(next_to(value, math.inf) for value in limits("gt"))])
    high = min([math.inf, *limits("le"), *(next_to(value, -math.inf) for value in limits("lt"))])
    return low, high


def _resolved(annotation: Any, bounds: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return the plain type of an annotation, without None, and its constraints."""
    if get_origin(annotation) is Annotated:
        inner, *own = get_args(annotation)
        return _resolved(inner, [*bounds, *own])
    if get_origin(annotation) in (Union, types.UnionType):
        parts = [part for part in get_args(annotation) if part is not type(None)]
        return _resolved(parts[0], bounds) if len(parts) == 1 else (None, [])
    return annotation, list(bounds)
