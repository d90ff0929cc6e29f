"""The place where a setting was written, and errors that name it: `engine.yaml:7: scheduler.agin_s:
unknown option, did you mean aging_s?`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

from dovetail.base.checks import did_you_mean as did_you_mean
from dovetail.base.roadmap import not_yet
from dovetail.errors import ConfigError, shown

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError
    from pydantic_core import ErrorDetails

KeyPath = tuple[str | int, ...]

LISTED = 10  # problems that one error lists; the rest are counted
MOVED = {  # keys of other releases and engines -> what is said of them
    "max_stretch": "it is the engine's key `prefill_limit` now, which applies to every scheduler: "
    "`prefill_limit: 2.0` at the top level, or `prefill_limit: null`",
    "pace": "it is called `prefill_limit` now",
    "num_blocks": "it is called `num_pages` now",
    "speculative_config": "here it is `speculation: {drafter: suffix, max_drafts: 8}`",
    "num_speculative_tokens": "here it is `speculation: {max_drafts: 8}`",
}
MAX_KEY = 200  # most characters of a key in an error


@dataclass(frozen=True, slots=True)
class Where:
    """A key in a configuration, with the origins of all keys that have one ("engine.yaml:7",
    "--set")."""

    path: KeyPath = ()
    origins: Mapping[KeyPath, str] = field(default_factory=dict)

    def at(self, *keys: str | int) -> Where:
        """Return the place of a key below this one."""
        return Where(self.path + keys, self.origins)

    @property
    def key(self) -> str:
        """The key in dotted form, as in overrides: "observers.0.level"."""
        text = ".".join(map(str, self.path))
        return text if len(text) <= MAX_KEY else f"{text[:MAX_KEY]}..."

    @property
    def origin(self) -> str | None:
        """The origin of the key, or else of the nearest one around it; None for a setting that was
        made in Python."""
        for length in range(len(self.path), -1, -1):
            if self.path[:length] in self.origins:
                return self.origins[self.path[:length]]
        return None

    def says(self, message: str) -> str:
        """Return the message, preceded by the place."""
        return ": ".join(part for part in (self.origin, self.key, message) if part)


def explain(
    error: ValidationError, model: type[BaseModel], given: Any, where: Where, noun: str
) -> ConfigError:
    """Make a `ConfigError` with a line for each key of `given` that `model` rejects, at most
    `LISTED`; `noun` is the word for a key ("option")."""
    found: dict[KeyPath, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        found.setdefault(_path_in(given, detail), []).append(detail)
    line_order = {path: index for index, path in enumerate(where.origins)}
    paths = sorted(found, key=lambda path: line_order.get(where.path + path, len(line_order)))
    lines = [
        where.at(*path).says(_message(path, found[path], model, noun)) for path in paths[:LISTED]
    ]
    return ConfigError("\n".join([*lines, *and_more(len(paths))]))


def and_more(count: int) -> list[str]:
    """Return a line that counts the problems beyond the listed ones, or no line if there are
    none."""
    return [f"… and {count - LISTED} more"] if count > LISTED else []


def _path_in(given: Any, detail: ErrorDetails) -> KeyPath:
    """Return `loc` without pydantic's additions for the branches of a union."""
    loc = detail["loc"]
    path = 0
    if detail["type"] in ("missing", "extra_forbidden"):
        return loc
    while path < len(loc):
        try:
            given = given[loc[path]]
        except (KeyError, IndexError, TypeError):
            break
        path += 1
    return loc[:path]


def _message(
    path: KeyPath, details: Sequence[ErrorDetails], model: type[BaseModel], noun: str
) -> str:
    kind = details[0]["type"]
    if kind == "missing":
        return f"this {noun} is required"
    if kind == "extra_forbidden":
        return unknown_key(str(path[-1]), _fields_at(model, path[:-1]), noun)
    if kind in ("model_type", "dict_type"):
        # pydantic would name Python's types
        return f"expected {noun}s and values below it, got {shown(details[0]['input'])}"
    right = [
        detail["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        for detail in details
    ]
    if kind in ("value_error", "assertion_error"):
        return "; ".join(right)
    return f"expected {' or '.join(dict.fromkeys(right))}, got {shown(details[0]['input'])}"


def unknown_key(wrong: str, valid: Sequence[str], noun: str) -> str:
    """Return the message for an unknown key."""
    if now := MOVED.get(wrong):
        return f"unknown {noun}: {now}"
    if planned := not_yet(wrong):
        return f"unknown {noun}: {planned}"
    if not valid:
        return f"unknown {noun}; there are none here"
    return f"unknown {noun}" + (did_you_mean(wrong, valid) or f"; valid are {', '.join(valid)}")


def _fields_at(model: type[BaseModel], path: KeyPath) -> list[str]:
    """Return the keys that are valid at a path into a model."""
    for key in path:
        if isinstance(key, int):
            continue
        info = model.model_fields.get(key)
        inner = _model_in(info.annotation) if info else None
        if inner is None:
            return []
        model = inner
    return [info.alias or name for name, info in model.model_fields.items()]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    from pydantic import BaseModel

    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(
        (model for model in map(_model_in, get_args(annotation)) if model is not None), None
    )
