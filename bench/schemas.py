"""Ten realistic JSON Schemas: with bounded strings, patterns, formats, enums, counted arrays,
ranges and nested objects."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def text(most: int | None = None, **keywords: Any) -> Schema:
    return {"type": "string", **({} if most is None else {"maxLength": most}), **keywords}


def many(items: Schema, least: int, most: int | None = None) -> Schema:
    return {
        "type": "array",
        "items": items,
        "minItems": least,
        **({} if most is None else {"maxItems": most}),
    }


def record(**properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


NULL: Schema = {"type": "null"}
ADDRESS = record(street=text(60), zip=text(pattern="^[0-9]{5}$"), city=text(40))
LINE = record(
    sku=text(pattern="^[A-Z]{3}-[0-9]{4}$"),
    description=text(80),
    quantity={"type": "integer", "minimum": 1, "maximum": 1000},
    price={"type": "number", "minimum": 0, "maximum": 100000},
)

SCHEMAS: dict[str, Schema] = {
    "tags": record(
        name=text(40), tags=many(text(20), 30, 90), street=text(60), zip=text(pattern="^[0-9]{5}$")
    ),
    "contact": record(
        name=text(50, minLength=1),
        email=text(format="email"),
        phone=text(pattern="^\\+[0-9]{7,14}$"),
        address=ADDRESS,
    ),
    "invoice": record(
        number=text(pattern="^INV-[0-9]{6}$"),
        date=text(format="date"),
        lines=many(LINE, 1, 10),
        currency={"enum": ["EUR", "USD", "GBP"]},
        customer=record(name=text(80), address=ADDRESS),
    ),
    "ticket": record(
        title=text(100, minLength=5),
        severity={"enum": ["low", "medium", "high", "critical"]},
        labels=many(text(15), 0, 5),
        steps=many(text(), 1, 8),
        assignee=either(text(30), NULL),
    ),
    "summary": record(
        headline=text(120, minLength=10),
        summary=text(500),
        keywords=many(text(25), 3, 8),
        sentiment={"enum": ["negative", "neutral", "positive"]},
        score={"type": "number", "minimum": -1, "maximum": 1},
    ),
    "product": {  # as pydantic writes it
        "$defs": {
            "Size": {"enum": ["S", "M", "L", "XL"], "title": "Size", "type": "string"},
            "Variant": {
                **record(
                    size={"$ref": "#/$defs/Size"},
                    color=text(12),
                    stock={"type": "integer", "minimum": 0},
                ),
                "title": "Variant",
            },
        },
        **record(
            title=text(60, title="Title"),
            description={**either(text(200), NULL), "default": None, "title": "Description"},
            variants=many({"$ref": "#/$defs/Variant"}, 1, 6),
            price={"type": "number", "exclusiveMinimum": 0, "title": "Price"},
        ),
    },
    "event": record(
        id=text(format="uuid"),
        begins=text(format="date-time"),
        place=record(name=text(40), latitude={"type": "number", "minimum": -90, "maximum": 90}),
        guests=many(text(format="email"), 1, 20),
        public={"type": "boolean"},
    ),
    "call": either(
        record(
            tool={"const": "search"},
            arguments=record(
                query=text(64), limit={"type": "integer", "minimum": 1, "maximum": 50}
            ),
        ),
        record(
            tool={"const": "mail"},
            arguments=record(to=text(format="email"), subject=text(78), body=text()),
        ),
        record(
            tool={"const": "calendar"}, arguments=record(day=text(format="date"), title=text(40))
        ),
    ),
    "entities": many(
        record(
            text=text(60),
            kind={
                "enum": ["person", "place", "company", "product", "date", "amount", "event", "law"]
            },
            begin={"type": "integer", "minimum": 0},
            end={"type": "integer", "minimum": 0},
        ),
        1,
        40,
    ),
    "settings": record(
        user=text(pattern="^[a-z][a-z0-9_]{2,19}$"),
        flags={"type": "object", "additionalProperties": {"type": "boolean"}},
        notes={"type": "object", "additionalProperties": text(30)},
        motto=text(),
    ),
}


def endless(schema: Schema) -> Schema:
    """Return an array schema with so many items that no answer ends before its token limit."""
    definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    return {
        **definitions,
        **many({key: value for key, value in schema.items() if key != "$defs"}, 300),
    }
