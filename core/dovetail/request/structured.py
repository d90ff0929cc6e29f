"""`Structured`: structured output as a user requests it in `SamplingParams.structured`.

This file doesn't need torch.

A `Structured` becomes a `GrammarSpec`, which a grammar backend compiles to a `Grammar`; each sample
has a `Matcher`, which fills its token mask.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, fields
from decimal import Decimal
from typing import Any, NoReturn

from dovetail.base.bounded_json import WrongJsonError, read_json
from dovetail.base.checks import BINARY, INT64, plain_integer, unicode_error
from dovetail.errors import RequestError, shown

# the fields of which exactly one is given
RULES = (
    "json_schema",
    "json_object",
    "regex",
    "grammar",
    "choice",
    "structural_tag",
)
# What may hide brackets, read once: unclosed, it extends to the end, and hides nothing (an empty
# group).
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+("?)', re.DOTALL)  # of JSON
# of a regular expression: an escape, a set of characters
_ESCAPED = re.compile(r"\\(.)|\[\^?\]?(?:[^\]\\]++|\\.)*+(\]?)", re.DOTALL)
_SURE_DIGITS = 17  # as many tell any double
_ZERO = re.compile(r"-?0(?:\.0+)?(?:[eE].*)?")
_NO_DIGITS = re.compile(r"[eE].*|[^0-9]")  # of a number's significand
_BRACKETS = re.compile(r"[\[\](){}]")
_TAG_KEYS = ("structures", "triggers", "at_least_one", "stop_after_first", "separator")
_STRUCTURE_KEYS = ("begin", "schema", "end")


@dataclass(frozen=True, slots=True)
class Structured:
    """A structured-output spec: exactly one of the first six fields.

    Raises `RequestError` naming the field for an invalid value.

    With `after`, say `"</think>"`, the spec applies after the first such text in the answer;
    anything may precede it. With `after_tokens`, the tokens of that text are forced after so many
    without it, which limits the reasoning of a model; then the first six fields may be missing.
    """

    # a JSON Schema: a mapping, its JSON, or a pydantic model's class; kept as its JSON
    json_schema: Any = None
    regex: str | None = None  # the whole answer matches it
    grammar: str | None = None  # a context-free grammar, in Lark's or GBNF's syntax
    choice: Sequence[str] | None = None  # the answer is one of these
    json_object: bool = False  # any JSON object
    # see `dovetail.api.grammar.GrammarSpec`; kept as its JSON
    structural_tag: str | Mapping[str, Any] | None = None
    after: str | None = None
    after_tokens: int | None = None  # 1 or more

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool):
            raise _wrong("json_object", f"it must be true or false, got {shown(self.json_object)}")
        given = [
            name
            for name in RULES
            if getattr(self, name) is not None and getattr(self, name) is not False
        ]
        if len(given) != 1 and (given or self.after_tokens is None):
            raise RequestError(
                f"structured must have exactly one of {', '.join(RULES)}; got "
                f"{' and '.join(given) or 'none'}"
            )
        for name in given:
            object.__setattr__(self, name, _CHECKS[name](getattr(self, name), name))
        if self.after is not None:
            object.__setattr__(self, "after", _text(self.after, "after"))
        if self.after_tokens is not None:
            tokens = plain_integer(self.after_tokens)
            if tokens is None or not 0 < tokens <= INT64[1]:
                raise _wrong(
                    "after_tokens",
                    f"it must be an integer of 1 or more, got {shown(self.after_tokens)}",
                )
            object.__setattr__(self, "after_tokens", tokens)
            if self.after is None:
                raise _wrong(
                    "after_tokens", "it needs `after`, the text that must have come by then"
                )

    @classmethod
    def of(cls, value: Any) -> Structured:
        """Return `value` if it is one, or make one of a mapping of its fields.

        Raises `RequestError`.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise RequestError(
                f"structured must be a Structured, or a mapping of its fields, got {shown(value)}"
            )
        known = [field.name for field in fields(cls)]
        for key in value:
            if key not in known:
                raise RequestError(
                    f"structured.{_key(key)}: there is no such field; there are {', '.join(known)}"
                )
        return cls(**value)

    @property
    def kind(self) -> str | None:
        """The field that is set: one of `RULES`; None: any text."""
        return next((name for name in RULES if getattr(self, name)), None)

    @property
    def text(self) -> str:
        """The spec as text: see `dovetail.api.grammar.GrammarSpec`."""
        value = "" if self.kind is None else getattr(self, self.kind)
        if self.kind == "choice":
            return json.dumps(value, ensure_ascii=False)
        return "" if self.json_object else str(value)

    def depth(self) -> int:
        """Return the nesting depth of brackets in the text, outside of strings and character
        classes."""
        plain = (_ESCAPED if self.kind == "regex" else _STRING).sub(
            lambda found: "" if found[found.re.groups] or found[1] else found[0], self.text
        )
        deepest = depth = 0
        for bracket in _BRACKETS.findall(plain):
            depth += 1 if bracket in "([{" else -1
            deepest = max(deepest, depth)
        return deepest


def _schema(value: Any, name: str) -> str:
    if isinstance(value, type) and callable(make := getattr(value, "model_json_schema", None)):
        try:
            value = make()
        except Exception as error:  # pydantic's, of a model that has no schema
            raise _wrong(
                name, f"{value.__name__} has no JSON Schema: {type(error).__name__}: {error}"
            ) from None
    return _json_object(value, name)


def _json_object(value: Any, name: str) -> str:
    """The JSON of an object, given as such or as its JSON."""
    if isinstance(value, str):
        value = _loaded(value, name)
    if not isinstance(value, Mapping):
        raise _wrong(name, f"it must be a JSON object: a mapping, or its JSON, got {shown(value)}")
    return _dumped(value, name)


def exact_float(text: str) -> float:
    """Return a decimal number of JSON as a double.

    Raises `ValueError` if it says more than a double holds: it is too large or too small, or has
    more than 17 digits, which tell any double, and isn't one.
    """
    value = float(text)
    if len(text) <= _SURE_DIGITS and (0 < abs(value) < math.inf or _ZERO.fullmatch(text)):
        return value
    digits = _NO_DIGITS.sub("", text).strip("0")
    out_of_range = math.isinf(value) or (digits and not value)
    if out_of_range or (len(digits) > _SURE_DIGITS and Decimal(text) != Decimal(value)):
        raise ValueError(
            f"{text if len(text) <= 80 else f'{text[:77]}...'} can't be kept exactly: a double "
            "holds about 17 digits, up to 1e308"
        )
    return value


def _loaded(text: str, name: str) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise _wrong(name, f"{constant} is no JSON")

    def read(number: str) -> float:
        try:
            return exact_float(number)
        except ValueError as error:
            raise _wrong(name, str(error)) from None

    try:
        return read_json(text, parse_constant=refuse, parse_float=read)
    except WrongJsonError as error:
        raise _wrong(name, str(error)) from None


def _dumped(value: Any, name: str) -> str:
    try:
        text = json.dumps(
            value, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_plain
        )
    except RecursionError:
        raise _wrong(name, "it is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise _wrong(name, f"it isn't JSON: {error}") from None
    return _text(text, name)


def _plain(value: Any) -> Any:
    """`json.dumps` calls this for values that it doesn't know: other mappings and sequences than
    dicts and lists."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, BINARY):
        return list(value)
    raise TypeError(f"{type(value).__name__} is no type of JSON")


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise _wrong(name, f"it must be a non-empty string, got {shown(value)}")
    if unicode_error(value):
        raise _wrong(name, "it isn't valid Unicode: it has half a surrogate pair")
    return value


def _choice(value: Any, name: str) -> tuple[str, ...]:
    if isinstance(value, str | BINARY) or not isinstance(value, Sequence | Set) or not value:
        raise _wrong(name, f"it must be a list of one string or more, got {shown(value)}")
    return tuple(dict.fromkeys(_text(one, name) for one in value))


def _structural_tag(value: Any, name: str) -> str:
    """Checks what `GrammarSpec` says of it. vLLM's `type` is left out."""
    if isinstance(value, str):
        value = _loaded(value, name)
    if not isinstance(value, Mapping):
        raise _wrong(name, f"it must be a JSON object: a mapping, or its JSON, got {shown(value)}")
    tag = {key: one for key, one in value.items() if (key, one) != ("type", "structural_tag")}
    for key in tag:
        if key not in _TAG_KEYS:
            raise _wrong(
                f"{name}.{_key(key)}", f"there is no such key; there are {', '.join(_TAG_KEYS)}"
            )
    for key in ("at_least_one", "stop_after_first"):
        if not isinstance(tag.get(key, False), bool):
            raise _wrong(f"{name}.{key}", f"it must be true or false, got {shown(tag[key])}")
    if not isinstance(tag.get("separator", ""), str):
        raise _wrong(f"{name}.separator", f"it must be a string, got {shown(tag['separator'])}")
    triggers = _items(tag, "triggers", name)
    if not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise _wrong(f"{name}.triggers", f"they must be non-empty strings, got {shown(triggers)}")
    for index, structure in enumerate(_items(tag, "structures", name)):
        _check_structure(structure, triggers, f"{name}.structures[{index}]")
    return _dumped(tag, name)


def _check_structure(structure: Any, triggers: Sequence[str], place: str) -> None:
    if not isinstance(structure, Mapping) or set(structure) != set(_STRUCTURE_KEYS):
        raise _wrong(
            place, f"it must be a mapping with {', '.join(_STRUCTURE_KEYS)}, got {shown(structure)}"
        )
    if not isinstance(structure["begin"], str) or not any(
        structure["begin"].startswith(trigger) for trigger in triggers
    ):
        raise _wrong(
            f"{place}.begin",
            f"it must begin with one of the triggers, got {shown(structure['begin'])}",
        )
    if not isinstance(structure["end"], str):
        raise _wrong(f"{place}.end", f"it must be a string, got {shown(structure['end'])}")
    if not isinstance(structure["schema"], Mapping):
        raise _wrong(
            f"{place}.schema",
            f"it must be a JSON Schema: a mapping, got {shown(structure['schema'])}",
        )


def _items(tag: Mapping[str, Any], key: str, name: str) -> Sequence[Any]:
    items = tag.get(key)
    if not isinstance(items, Sequence) or isinstance(items, str | BINARY) or not items:
        raise _wrong(
            f"{name}.{key}", f"it must be a list with at least one item, got {shown(items)}"
        )
    return items


def _key(key: Any) -> str:
    """Return an unknown key, shortened for an error."""
    return key[:80] if isinstance(key, str) else shown(key)


def _flag(value: bool, name: str) -> bool:
    return value


def _wrong(name: str, what: str) -> RequestError:
    """Make an error about a field.

    Its text begins with "structured", by which servers find the parameter.
    """
    return RequestError(f"structured.{name}: {what}")


_CHECKS: Mapping[str, Any] = {
    "json_schema": _schema,
    "json_object": _flag,
    "regex": _text,
    "grammar": _text,
    "choice": _choice,
    "structural_tag": _structural_tag,
}
