"""`module_lines`: the names of a module as text, for the command and the reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dovetail.registry.contract.diff import signature
from dovetail.registry.contract.document import Field, Method, Module, Type

IMPLIED = ("ABC", "Enum", "NamedTuple", "Protocol")  # bases that a class's form says already


def module_lines(module: Module) -> Iterator[str]:
    """Yield a paragraph for each class, then the functions, then the constants."""
    paragraphs = [list(_class(name, one)) for name, one in module.types.items()]
    paragraphs.append([_method(name, method, "def ") for name, method in module.functions.items()])
    paragraphs.append(
        [
            f"{name} = {'…' if constant.value is None else constant.value}"
            for name, constant in module.constants.items()
        ]
    )
    for at, lines in enumerate(filter(None, paragraphs)):
        yield from ([""] if at else [])
        yield from lines


def _class(name: str, one: Type) -> Iterator[str]:
    bases = [base for base in one.bases if base not in IMPLIED]
    yield f"{one.form} {name}" + (f"({', '.join(bases)})" if bases else "")
    for line in (*_fields(one.fields), *_members(one), *_methods(one.methods)):
        yield f"    {line}"


def _fields(fields: Mapping[str, Field]) -> Iterator[str]:
    for name, field in fields.items():
        kind = f": {field.type}" if field.type else ""
        yield f"{name}{kind}" + ("" if field.default is None else f" = {field.default}")


def _members(one: Type) -> Iterator[str]:
    return (f"{name} = {member.value}" for name, member in one.members.items())


def _methods(methods: Mapping[str, Method]) -> Iterator[str]:
    return (_method(name, method, "def ") for name, method in methods.items())


def _method(name: str, method: Method, before: str) -> str:
    """Return "abstract def name(…) -> …", or "property name -> …"."""
    words, opening, rest = signature(method).partition("(")
    if method.form == "property":
        kind, arrow, returns = words.partition(" -> ")
        return f"{kind} {name}{arrow}{returns}{opening}{rest}"
    first = {"method": "self", "class method": "cls"}.get(method.form, "")
    comma = ", " if first and method.parameters else ""
    return f"{words}{before}{name}{opening}{first}{comma}{rest}"
