"""The lab's short syntax for values: a name with positional or named arguments, as in `poisson(4)`,
`lognormal(median=900, sigma=1.1)`, `oracle`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from dovetail_lab.nearest import suggest
from dovetail_lab.traces.reading import TraceError

_CALL = re.compile(r"(?P<name>\w+)\s*(?:\((?P<arguments>.*)\))?", re.DOTALL)

Model = TypeVar("Model", bound=BaseModel)


class Value(BaseModel):
    """Base of values parsed from this syntax. The order of fields is the order of positional
    arguments."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def parse_call(text: str, kinds: Mapping[str, type[Model]], what: str) -> Model:
    """Parse `text` into one of `kinds`, selected by name. Raises `TraceError` with `what` was
    expected and the valid names."""
    match = _CALL.fullmatch(text.strip())
    if match is None:
        raise TraceError(f"{what}: expected a name, or name(arguments), got {text!r}")
    kind = kinds.get(match["name"])
    if kind is None:
        raise TraceError(f"{what}: unknown {match['name']!r}{suggest(match['name'], kinds)}")
    try:
        return kind(**_arguments(match["arguments"] or "", list(kind.model_fields), text, what))
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        where = ".".join(map(str, detail["loc"]))
        usage = f"{match['name']}({', '.join(kind.model_fields)})"
        raise TraceError(
            f"{what}: {text!r}: "
            f"{f'{where}: ' if where else ''}{detail['msg'].removeprefix('Value error, ')}; it is "
            f"{usage}"
        ) from None


def _arguments(text: str, names: list[str], call: str, what: str) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for index, part in enumerate(part.strip() for part in text.split(",")) if text.strip() else ():
        name, equals, value = part.rpartition("=")
        if not equals and index >= len(names):
            raise TraceError(
                f"{what}: {call!r}: expected at most {len(names)} arguments ({', '.join(names)})"
            )
        name = name.strip() if equals else names[index]
        if name in given or not value.strip():
            raise TraceError(
                f"{what}: {call!r}: "
                + (f"{name} is given twice" if name in given else "an argument is empty")
            )
        given[name] = value.strip()
    return given
