"""Griffe extensions for the API reference, listed in `mkdocs.yml`.

In this code base `seed: int = 0  # 64 bits` documents the field. `FieldComments` turns such
comments into docstrings; `FieldTables` then lists the fields of a class in one table instead of a
heading each. `docs_templates/` has the table's template.
"""

from __future__ import annotations

import ast
import tokenize
from functools import cache
from pathlib import Path
from typing import Any

import griffe


class FieldComments(griffe.Extension):
    """Gives attributes without a docstring the comment at the end of their line, otherwise the
    comment lines right above."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        if attr.docstring is None and attr.lineno is not None and isinstance(attr.filepath, Path):
            text = comment_at(attr.filepath, attr.lineno, attr.endlineno or attr.lineno)
            if text:
                attr.docstring = griffe.Docstring(text, parent=attr, lineno=attr.lineno)


class FieldTables(griffe.Extension):
    """Moves the fields of each class to a section of its docstring. They stay in the tree, but
    templates skip non-public members."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        hidden = [
            member
            for member in cls.members.values()
            if member.name.startswith("_") or _is_field(member)
        ]
        fields = [
            member
            for member in hidden
            if isinstance(member, griffe.Attribute) and _is_told_of(member)
        ]
        meanings = {
            field.name: meaning for field in fields if (meaning := _meaning(field)) is not None
        }
        rows = [
            f"    {name}: {meaning}"
            for name, meaning in meanings.items()
            if meaning or not _has_signature(cls)
        ]
        if rows:
            above = [cls.docstring.value, ""] if cls.docstring else []
            line = cls.docstring.lineno if cls.docstring else cls.lineno
            cls.docstring = griffe.Docstring(
                "\n".join([*above, "Attributes:", *rows]), parent=cls, lineno=line, parser="google"
            )
        for member in hidden:
            member.public = False


def _is_field(member: griffe.Object | griffe.Alias) -> bool:
    return isinstance(member, griffe.Attribute) and "property" not in member.labels


def _is_told_of(field: griffe.Attribute) -> bool:
    """Hide pydantic's settings of a model."""
    return not field.name.startswith("_") and field.name != "model_config"


def _has_signature(cls: griffe.Class) -> bool:
    """True if the signature above the table shows the fields and types already."""
    return any(str(decorator.value).startswith("dataclass") for decorator in cls.decorators)


def _meaning(field: griffe.Attribute) -> str | None:
    """Return a field's description for the table: "" if only its type is known, None if not even
    that."""
    typed = field.annotation is not None or _take_type_of_parameter(field)
    if field.docstring is not None:
        return " ".join(field.docstring.value.split())
    if (described := _description(field)) or typed:
        return described
    return (
        f"`{field.value}`"
        if "class-attribute" in field.labels and field.value is not None
        else None
    )


def _description(field: griffe.Attribute) -> str:
    """Return the description of a pydantic `Field(…, description="…")`."""
    arguments = field.value.arguments if isinstance(field.value, griffe.ExprCall) else ()
    given = [
        one.value
        for one in arguments
        if isinstance(one, griffe.ExprKeyword) and one.name == "description"
    ]
    return str(ast.literal_eval(str(given[0]))) if given else ""


def _take_type_of_parameter(field: griffe.Attribute) -> bool:
    """Give `self.client = client` the type of the argument."""
    init = field.parent.members.get("__init__") if field.parent else None
    if (
        not isinstance(init, griffe.Function)
        or str(field.value) != field.name
        or field.name not in init.parameters
    ):
        return False
    field.annotation = init.parameters[field.name].annotation
    return True


def comment_at(path: Path, first: int, last: int) -> str:
    """Return the comment of lines `first` to `last` of a file; "" if there is none."""
    trailing, whole_lines = _comments(path)
    if last in trailing:
        return _sentence(trailing[last])
    above: list[str] = []
    while first - 1 in whole_lines:
        first -= 1
        above.insert(0, whole_lines[first])
    return _sentence(" ".join(above)) if above else ""


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] if text[:2].islower() else text


@cache
def _comments(path: Path) -> tuple[dict[int, str], dict[int, str]]:
    """Return comments by line: those at the end of a line of code, and those on separate lines."""
    trailing: dict[int, str] = {}
    whole_lines: dict[int, str] = {}
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT:
                home = whole_lines if token.line.lstrip().startswith("#") else trailing
                home[token.start[0]] = token.string.lstrip("#").strip()
    return trailing, whole_lines
