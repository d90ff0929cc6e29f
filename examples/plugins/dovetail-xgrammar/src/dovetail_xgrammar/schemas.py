"""Writes JSON Schemas as GBNF: compact JSON, with properties in the schema's order.

A schema has one of the keywords of `DECIDING`, or types with the keywords of `OF_TYPE`. Any other
keyword is rejected by name and place, since ignoring it would allow wrong answers. A `pattern`
matches the whole string: a backend may allow less than a schema, never more.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from dovetail.request.structured import exact_float

from dovetail_xgrammar.regexes import Ranges, character_class, gbnf, others

ANNOTATIONS = frozenset(
    {"$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description"}
    | {"examples", "readOnly", "title", "writeOnly"}
)
DECIDING = ("$ref", "const", "enum", "anyOf")
OF_TYPE: Mapping[str, frozenset[str]] = {
    "null": frozenset(),
    "boolean": frozenset(),
    "number": frozenset(),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "string": frozenset({"pattern", "minLength", "maxLength"}),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
PYTHON_TYPES: Mapping[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "number": (int, float),
    "integer": (int,),
    "string": (str,),
    "array": (list,),
    "object": (dict,),
}
MAX_COUNT = 2**31 - 1
MAX_NESTING = 100
ESCAPED: Ranges = [(0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C)]  # within a string of JSON
PLAIN = character_class(others(ESCAPED))

ANY_JSON = rf"""
value ::= object | array | string | number | "true" | "false" | "null"
object ::= "{{" (string ":" value ("," string ":" value)*)? "}}"
array ::= "[" (value ("," value)*)? "]"
string ::= "\"" character* "\""
character ::= {PLAIN} | "\\" (["\\/bfnrt] | "u00" [01] [0-9a-f])
number ::= integer ("." [0-9]+)? ([eE] [+\-]? [0-9] [0-9]?)?
integer ::= "-"? ("0" | [1-9] [0-9]*)
"""


def grammar_of(text: str) -> str:
    """Return the grammar of a JSON Schema. Raises `ValueError` with the place of what is wrong."""
    schema = json.loads(text, parse_float=exact_float, parse_constant=_no_constant)
    if _depth(schema) > MAX_NESTING:
        raise ValueError(f"its JSON is nested more than {MAX_NESTING} levels deep")
    return "\n".join([*_Writer(schema).grammar(), ANY_JSON])


def grammar_of_objects() -> str:
    return f"root ::= object\n{ANY_JSON}"


def literal(text: str) -> str:
    """Return a literal of GBNF."""
    return json.dumps(text, ensure_ascii=False)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} isn't JSON")


def _depth(value: Any) -> int:
    depth = 0
    level = [value]
    while level:
        depth += 1
        level = [inner for outer in level for inner in _within(outer)]
    return depth


def _within(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else ()


def _refuse(place: str, why: str) -> NoReturn:
    raise ValueError(f"{place}: {why}")


class _Writer:
    """Writes the rules of one document, one for each target of a `$ref`, and for other parts."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.rules: dict[str, str] = {}  # expressions by name
        self.names = {"#": "root"}  # of rules, by `$ref`
        self.direct: dict[str, set[str]] = {}  # by `$ref`: others that its value is one of

    def grammar(self) -> Iterator[str]:
        """Yield the rules. Raises `ValueError` for what no value satisfies, or isn't supported."""
        written = 0
        while written < len(self.names):  # which grow meanwhile
            reference, name = list(self.names.items())[written]
            self.direct[reference] = set()
            self.rules[name] = self.value(self.target(reference), reference, reference)
            written += 1
        self.require_values()
        return (f"{name} ::= {body}" for name, body in self.rules.items())

    def require_values(self) -> None:
        """Reject `$ref`s that lead to each other without an object or array between."""
        left = dict(self.direct)
        while ended := [name for name, targets in left.items() if not targets & left.keys()]:
            for name in ended:
                del left[name]
        if left:
            _refuse(next(iter(left)), f"its $refs are circular: {', '.join(left)}")

    def value(self, schema: Any, place: str, of: str | None = None) -> str:
        """Return the expression of a schema. `of`: the `$ref` whose value this is."""
        if schema is True:
            return "value"
        if not isinstance(schema, dict):
            _refuse(place, "no value satisfies false" if schema is False else "it isn't a schema")
        deciding = next((key for key in DECIDING if key in schema), None)
        types = self.types(schema, place)
        self.require_known(schema, place, deciding, types)
        if deciding == "$ref":
            return self.reference(schema["$ref"], place, of)
        if deciding == "anyOf":
            parts = enumerate(self.listed(schema, "anyOf", place))
            return _either(self.value(part, f"{place}/anyOf/{n}", of) for n, part in parts)
        if deciding:
            values = (
                [schema["const"]] if deciding == "const" else self.listed(schema, "enum", place)
            )
            return self.constants(values, types, place)
        if not types:
            return "value"
        return _either(self.of_type(name)(schema, place) for name in types)

    def require_known(
        self, schema: dict[str, Any], place: str, deciding: str | None, types: Sequence[str]
    ) -> None:
        """Reject keywords that would be ignored."""
        known = set(ANNOTATIONS)
        if deciding:
            known.add(deciding)
        if deciding in ("const", "enum"):
            known.add("type")
        if not deciding:
            known.update(("type",), *(OF_TYPE[name] for name in types))
        for key in schema:
            if key not in known:
                beside = f" beside {deciding}" if deciding else ""
                why = f"the backend xgrammar doesn't support this keyword{beside}"
                _refuse(place, f"{key} = {json.dumps(schema[key])[:80]}: {why}")

    def types(self, schema: dict[str, Any], place: str) -> Sequence[str]:
        """Return the types of a schema; its keywords may imply one."""
        types = schema.get("type")
        if types is None:
            return [name for name in ("array", "object") if OF_TYPE[name] & schema.keys()]
        types = types if isinstance(types, list) else [types]
        if not types or not all(isinstance(name, str) and name in OF_TYPE for name in types):
            _refuse(place, f"type = {json.dumps(schema['type'])}: expected {', '.join(OF_TYPE)}")
        return types

    def listed(self, schema: dict[str, Any], key: str, place: str) -> list[Any]:
        if not isinstance(schema[key], list) or not schema[key]:
            _refuse(place, f"{key} must be a list of one or more")
        return schema[key]

    def constants(self, values: list[Any], types: Sequence[str], place: str) -> str:
        kinds = [kind for name in types for kind in PYTHON_TYPES[name]]
        if kinds and not all(type(value) in kinds for value in values):
            _refuse(place, "a value doesn't have the given type")
        spelled = (json.dumps(v, ensure_ascii=False, separators=(",", ":")) for v in values)
        return _either(map(literal, spelled))

    def reference(self, reference: Any, place: str, of: str | None) -> str:
        if self.target(reference) is None:
            _refuse(place, f"$ref = {json.dumps(reference)}: expected # or #/$defs/NAME of its own")
        if of is not None:
            self.direct[of].add(reference)
        return self.names.setdefault(reference, f"ref{len(self.names)}")

    def target(self, reference: Any) -> Any:
        """Return the target of a `$ref`; None if it has none that is supported."""
        if reference == "#":
            return self.root
        parts = reference.split("/") if isinstance(reference, str) else []
        if len(parts) != 3 or parts[0] != "#" or parts[1] not in ("$defs", "definitions"):
            return None
        definitions = self.root.get(parts[1])
        return definitions.get(parts[2]) if isinstance(definitions, dict) else None

    def of_type(self, name: str) -> Callable[[dict[str, Any], str], str]:
        writers: dict[str, Callable[[dict[str, Any], str], str]] = {
            "null": lambda schema, place: '"null"',
            "boolean": lambda schema, place: '("true" | "false")',
            "number": lambda schema, place: "number",
            "integer": _integer,
            "string": _string,
            "array": self.array,
            "object": self.object,
        }
        return writers[name]

    def array(self, schema: dict[str, Any], place: str) -> str:
        least, most = _counts(schema, "minItems", "maxItems", place)
        if most == 0:
            return '"[]"'
        item = self.named(self.value(schema.get("items", True), f"{place}/items"))
        further = f'("," {item}){{{max(least, 1) - 1},{"" if most is None else most - 1}}}'
        some = f'"[" {item} {further} "]"'
        return some if least else f'("[]" | {some})'

    def object(self, schema: dict[str, Any], place: str) -> str:
        """Return the members in order: named ones, then any others."""
        named = schema.get("properties", {})
        required = schema.get("required", [])
        if not isinstance(named, dict):
            _refuse(place, "properties must be an object of schemas")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            _refuse(place, "required must be a list of strings")
        for name in required:
            if name not in named:
                _refuse(place, f"required: {name!r} isn't among the properties")
        members = []
        for name, part in named.items():
            if part is False and name not in required:
                continue
            value = self.value(part, f"{place}/properties/{name}")
            pair = self.named(f"{literal(json.dumps(name, ensure_ascii=False) + ':')} {value}")
            members.append((pair, name in required))
        others = schema.get("additionalProperties", True)
        free = None
        if others is not False:
            value = self.value(others, f"{place}/additionalProperties")
            free = self.named(f'"\\"" {self.named(_other_keys(list(named)))} ":" {value}')
        return f'"{{" {self.members(members, free)} "}}"'

    def members(self, members: Sequence[tuple[str, bool]], free: str | None) -> str:
        """Return pairs, each of which may be required, with commas between those that are there.

        `later` is what may follow a pair, `first` what may come where no pair has been written.
        """
        later = f'("," {free})*' if free else '""'
        first = f'({free} ("," {free})*)?' if free else '""'
        for pair, required in reversed(members):
            begun = f"{pair} {later}"
            first = begun if required else f"({begun} | {first})"
            comma = f'"," {pair}'
            later = self.named(f"{comma if required else f'({comma})?'} {later}")
        return first

    def named(self, expression: str) -> str:
        """Return the name of a rule with that expression."""
        name = f"part{len(self.rules)}"
        self.rules[name] = expression
        return name


def _either(expressions: Iterator[str]) -> str:
    return f"({' | '.join(expressions)})"


def _counts(schema: dict[str, Any], low: str, high: str, place: str) -> tuple[int, int | None]:
    least = schema.get(low, 0)
    most = schema.get(high)
    for key, count in ((low, least), (high, most)):
        if count is not None and not (type(count) is int and 0 <= count <= MAX_COUNT):
            _refuse(place, f"{key} = {json.dumps(count)}: expected 0 to {MAX_COUNT}")
    if most is not None and least > most:
        _refuse(place, f"no value satisfies {low} = {least} and {high} = {most}")
    return least, most


def _string(schema: dict[str, Any], place: str) -> str:
    least, most = _counts(schema, "minLength", "maxLength", place)
    bounded = "minLength" in schema or "maxLength" in schema
    if "pattern" not in schema:
        bounds = f"{{{least},{'' if most is None else most}}}"
        return rf'"\"" character{bounds} "\""' if bounded else "string"
    if bounded:
        _refuse(place, "pattern: the backend xgrammar doesn't support it with a length")
    pattern = schema["pattern"]
    try:
        return rf'"\"" ({gbnf(pattern, ESCAPED)}) "\""'
    except (TypeError, ValueError) as error:
        _refuse(place, f"pattern = {json.dumps(pattern)}: {error}")


def _other_keys(names: Sequence[str]) -> str:
    """Return the rest of a key that is none of `names`, with its closing quote, and no escapes."""
    plain = [name for name in names if json.dumps(name, ensure_ascii=False)[1:-1] == name]
    heads = sorted({name[0] for name in plain if name})
    rest = character_class(others([*ESCAPED, *((ord(head), ord(head)) for head in heads)]))
    ways = [rf'{rest} {PLAIN}* "\""']
    ways += [] if "" in plain else [r'"\""']
    for head in heads:
        tails = [name[1:] for name in plain if name.startswith(head)]
        ways.append(f"{literal(head)} {_other_keys(tails)}")
    return _either(iter(ways))


def _integer(schema: dict[str, Any], place: str) -> str:
    bounds = {key: schema[key] for key in OF_TYPE["integer"] if key in schema}
    for key, bound in bounds.items():
        if type(bound) is not int:
            _refuse(place, f"{key} = {json.dumps(bound)}: expected a whole number")
    lows = [bounds.get("minimum"), _plus(bounds.get("exclusiveMinimum"), 1)]
    highs = [bounds.get("maximum"), _plus(bounds.get("exclusiveMaximum"), -1)]
    low = max((bound for bound in lows if bound is not None), default=None)
    high = min((bound for bound in highs if bound is not None), default=None)
    if low is not None and high is not None and low > high:
        _refuse(place, f"no whole number satisfies {json.dumps(bounds)}")
    ways = []
    if high is None or high >= 0:
        ways += _counted(max(low or 0, 0), high)
    if low is None or low < 0:
        least = 1 if high is None else max(1, -high)
        ways += [f'"-" {way}' for way in _counted(least, None if low is None else -low)]
    return _either(iter(ways))


def _plus(bound: int | None, more: int) -> int | None:
    return None if bound is None else bound + more


def _counted(low: int, high: int | None) -> Iterator[str]:
    """Yield expressions of the whole numbers from `low`, which isn't negative, to `high`."""
    for digits in range(len(str(low)), len(str(low if high is None else high)) + 1):
        first = max(low, 0 if digits == 1 else 10 ** (digits - 1))
        last = 10**digits - 1 if high is None else min(high, 10**digits - 1)
        if first <= last:
            yield _digits(str(first), str(last))
    if high is None:
        yield f"[1-9] [0-9]{{{len(str(low))},}}"


def _digits(low: str, high: str) -> str:
    """Return the numbers between two of the same number of digits."""
    if not low:
        return '""'
    rest = len(low) - 1
    if low[0] == high[0]:
        return f'"{low[0]}" {_digits(low[1:], high[1:])}'
    ways = [f'"{low[0]}" {_digits(low[1:], "9" * rest)}']
    if int(high[0]) - int(low[0]) > 1:
        ways.append(f"[{int(low[0]) + 1}-{int(high[0]) - 1}] [0-9]{{{rest},{rest}}}")
    ways.append(f'"{high[0]}" {_digits("0" * rest, high[1:])}')
    return _either(iter(ways))
