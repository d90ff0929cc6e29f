"""`Parameters`: which parameters of a request's tools accept strings. Needed for formats that write arguments without quotes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Tools = Sequence[Mapping[str, Any]]

_DEEPEST = 8  # nested alternatives and references


class Parameters:
    """Schemas of all functions' parameters. They come from the client: anything that isn't a schema is ignored."""

    def __init__(self, tools: Tools) -> None:
        self._schemas: dict[str, Mapping[str, Any]] = {}  # by function
        for tool in tools:
            function = _mapping(_mapping(tool).get("function"))
            self._schemas[str(function.get("name"))] = _mapping(function.get("parameters"))

    def take_text(self, function: str, parameter: str) -> bool:
        """Return True if the parameter accepts strings, or is unknown."""
        schema = self._schemas.get(function, {})
        return _takes_text(_mapping(schema.get("properties")).get(parameter), schema, _DEEPEST)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _takes_text(value: Any, root: Mapping[str, Any], depth: int) -> bool:
    schema = _mapping(value)
    if depth == 0:
        return True
    if isinstance(reference := schema.get("$ref"), str):
        return _takes_text(_referred(reference, root), root, depth - 1)
    for word in ("anyOf", "oneOf", "allOf"):
        if isinstance(several := schema.get(word), list) and several:
            return any(_takes_text(one, root, depth - 1) for one in several)
    if isinstance(values := schema.get("enum"), list):
        return any(isinstance(one, str) for one in values)
    kinds = schema.get("type", "string")
    return "string" in kinds if isinstance(kinds, list) else kinds == "string"


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    value: Any = root
    for name in reference.removeprefix("#").strip("/").split("/"):
        value = _mapping(value).get(name)
    return value
