"""JSON Schemas as programs write them, by the hundred: records, configurations, calls of tools,
trees, made of what a seed chooses.

`schema(seed)` is the same in each run. It describes something that can be written: each choice of
keywords has values.
"""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

DEEPEST = 3  # objects and arrays within each other
NAMES = (
    *("id", "name", "title", "email", "age", "price", "tags", "items", "address", "street", "city", "zip_code", "country", "status", "kind", "value"),
    *("created_at", "updatedAt", "is_active", "count", "score", "lat", "lon", "url", "notes", "parent", "children", "options", "timeout", "retries"),
    *("first name", "größe", "a/b", "$price", "x-y", "quote\"d", "back\\slash", "", "名前", "line\nbreak", "tab\t", "😀"),
)  # fmt: skip
WORDS = (
    "red",
    "green",
    "blue",
    "open",
    "closed",
    "on hold",
    "A",
    "B+",
    "N/A",
    "",
    "été",
    "12",
    "true",
    "null",
    'say "hi"',
    "back\\slash",
    "名",
    "a\nb",
    "/",
    "😀",
)
PATTERNS = (
    *("^[A-Z]{3}-[0-9]{4}$", "^\\d{5}(-\\d{4})?$", "^#[0-9a-fA-F]{6}$", "^[a-z][a-z0-9_]*$", "^(foo|bar|baz)+$", "^v\\d+\\.\\d+(\\.\\d+)?$"),
    *("^[^@ ]+@[^@ ]+\\.[a-z]{2,4}$", "^[\\w.-]+$", "^.{2,8}$", "^\\+?[0-9 ]{6,12}$", "^(?:[01]\\d|2[0-3]):[0-5]\\d$", "^\\S+$", "^[äöü]?x*$"),
    *("^$", "^a\\/b\\\\?$", '^"?quoted"?$', "^[\\x20-\\x7e]{1,10}$", "[0-9]", "^x", "y$"),
)  # fmt: skip
FORMATS = (
    "date",
    "time",
    "date-time",
    "email",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
    "hostname",
    "duration",
)


def schema(seed: int) -> Schema:
    return _Maker(random.Random(seed)).document()


class _Maker:
    """Makes one schema. `shared` are the definitions that it refers to."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.shared: dict[str, Schema] = {}
        self.key = chance.choice(("$defs", "$defs", "definitions"))

    def document(self) -> Schema:
        made = self.chance.choices(
            (self.record, self.list, self.map, self.tree, self.alternatives, self.leaf),
            (12, 2, 1, 1, 1, 1),
        )[0](0)
        about = (
            {"$schema": "https://json-schema.org/draft/2020-12/schema"}
            if self.chance.random() < 0.3
            else {}
        )
        if self.chance.random() < 0.3:
            about |= {
                "title": "A thing",
                "description": 'As an author says it: {"not": "a schema"}.',
                "examples": [1, {"a": []}],
                "default": None,
            }
        return {**about, **made, **({self.key: self.shared} if self.shared else {})}

    def value(self, depth: int) -> Schema:
        if depth >= DEEPEST:
            return self.leaf(depth)
        made = (
            self.leaf,
            self.record,
            self.list,
            self.map,
            self.tuple,
            self.tree,
            self.reference,
            self.alternatives,
            self.nullable,
        )
        return self.chance.choices(made, (12, 2, 3, 1, 1, 0.4, 2, 1, 1))[0](depth)

    # ---- what is made of others

    def record(self, depth: int) -> Schema:
        names = self.chance.sample(NAMES, self.chance.randint(0 if depth else 1, 5))
        made: Schema = {
            "type": "object",
            "properties": {name: self.value(depth + 1) for name in names},
        }
        required = [name for name in names if self.chance.random() < 0.7]
        if required or self.chance.random() < 0.2:
            made["required"] = required
        closed = self.chance.random()
        if closed < 0.7:
            made["additionalProperties"] = False
        elif closed < 0.8:
            made["additionalProperties"] = self.leaf(depth)
        return made

    def map(self, depth: int) -> Schema:
        return {"type": "object", "additionalProperties": self.value(depth + 1)}

    def list(self, depth: int) -> Schema:
        made: Schema = {"type": "array", "items": self.value(depth + 1)}
        least = self.chance.randint(0, 3)
        if self.chance.random() < 0.4:
            made["minItems"] = least
        if self.chance.random() < 0.6:
            made["maxItems"] = least + self.chance.randint(0, 3)
        return made

    def tuple(self, depth: int) -> Schema:
        parts = [self.leaf(depth) for _ in range(self.chance.randint(1, 3))]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}

    def tree(self, depth: int) -> Schema:
        name = f"node{len(self.shared)}"
        self.shared[name] = {}
        here = {"$ref": f"#/{self.key}/{name}"}
        further = self.chance.choice(
            ({"type": "array", "items": here, "maxItems": 2}, {"anyOf": [here, {"type": "null"}]})
        )
        self.shared[name] = {
            "type": "object",
            "properties": {"label": self.leaf(depth), "next": further},
            "required": ["label", "next"],
            "additionalProperties": False,
        }
        return here

    def reference(self, depth: int) -> Schema:
        name = f"{self.chance.choice(('point', 'Address', 'line_item'))}{len(self.shared)}"
        self.shared[name] = self.record(depth + 1)
        return {"$ref": f"#/{self.key}/{name}"}

    def alternatives(self, depth: int) -> Schema:
        how = self.chance.choice(("anyOf", "anyOf", "oneOf", "tagged"))
        if how == "tagged":
            kinds = self.chance.sample(("circle", "square", "line"), 2)
            return {"oneOf": [self.tagged(kind, depth) for kind in kinds]}
        by_type = [
            {"type": "boolean"},
            {"type": "null"},
            self.integer(),
            self.string(),
            self.record(depth + 1),
            self.list(depth + 1),
        ]
        return {how: self.chance.sample(by_type, self.chance.randint(2, 4))}

    def tagged(self, kind: str, depth: int) -> Schema:
        properties = {
            "kind": {"const": kind},
            **{name: self.leaf(depth) for name in self.chance.sample(NAMES[:10], 2)},
        }
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }

    def nullable(self, depth: int) -> Schema:
        return {"type": [self.chance.choice(("string", "integer", "number", "boolean")), "null"]}

    # ---- plain values

    def leaf(self, depth: int) -> Schema:
        made = (
            self.string,
            self.integer,
            self.number,
            self.enum,
            self.const,
            lambda: {"type": "boolean"},
            lambda: {"type": "null"},
        )
        return self.chance.choices(made, (6, 3, 2, 3, 1, 2, 0.5))[0]()

    def string(self) -> Schema:
        made: Schema = {"type": "string"}
        how = self.chance.random()
        if how < 0.25:
            made["minLength"] = self.chance.randint(0, 5)
            if how < 0.15:
                made["maxLength"] = made["minLength"] + self.chance.randint(0, 20)
        elif how < 0.45:
            made["pattern"] = self.chance.choice(PATTERNS)
        elif how < 0.6:
            made["format"] = self.chance.choice(FORMATS)
        return made

    def integer(self) -> Schema:
        made: Schema = {"type": "integer"}
        least = self.chance.choice((-1000, -12, -1, 0, 1, 7, 99, 1000))
        if self.chance.random() < 0.5:
            made[self.chance.choice(("minimum", "minimum", "exclusiveMinimum"))] = least
        if self.chance.random() < 0.5:
            made[self.chance.choice(("maximum", "maximum", "exclusiveMaximum"))] = (
                least + self.chance.choice((2, 9, 100, 12345))
            )
        if self.chance.random() < 0.1:
            made["multipleOf"] = self.chance.choice((1, 2))
        return made

    def number(self) -> Schema:
        made: Schema = {"type": "number"}
        least = self.chance.choice((-100, -1.5, -0.25, 0, 0.5, 1, 3.75, 20))
        if self.chance.random() < 0.5:
            made[self.chance.choice(("minimum", "exclusiveMinimum"))] = least
        if self.chance.random() < 0.5:
            made[self.chance.choice(("maximum", "exclusiveMaximum"))] = least + self.chance.choice(
                (0.5, 1, 10.25, 1000)
            )
        return made

    def enum(self) -> Schema:
        values: list[Any] = self.chance.sample(WORDS, self.chance.randint(1, 5))
        if self.chance.random() < 0.2:
            values += self.chance.sample(
                [0, 1, -7, 2.5, True, None, [], {}, [1, "x"], {"a": {"b": None}}], 3
            )
            return {"enum": values}
        return (
            {"type": "string", "enum": values} if self.chance.random() < 0.5 else {"enum": values}
        )

    def const(self) -> Schema:
        return {
            "const": self.chance.choice(
                ("fixed", "", 1, 0, -3.5, True, None, [1, 2], {"a": 1, "b": ["x"]}, 'a"b')
            )
        }
