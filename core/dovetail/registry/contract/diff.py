"""`changes_between`: what a contract adds to, changes in or removes from an older one, and whether
packages for the older one still run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from dovetail.registry.contract.document import (
    Check,
    Constant,
    Contract,
    Field,
    Member,
    Method,
    Module,
    Parameter,
    Type,
)

Act = Literal["added", "changed", "removed"]
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Change:
    """One difference. `name`: "dovetail.api.scheduler:Step.grant", or a clause's or a check's id.
    `detail`: what changed, for readers. `additive`: packages for the older contract still run."""

    act: Act
    name: str
    detail: str
    additive: bool

    def __str__(self) -> str:
        breaks = "" if self.additive else " [breaks packages]"
        return f"{self.act} {self.name}{f': {self.detail}' if self.detail else ''}{breaks}"


def changes_between(old: Contract, new: Contract) -> list[Change]:
    """Return all changes, names first, then clauses and checks. Those two are always additive: a
    clause may be worded anew, and a check is applied to components of its own version on."""
    return [*name_changes(old, new), *_text_changes(old, new), *_suite_changes(old, new)]


def name_changes(old: Contract, new: Contract) -> list[Change]:
    """Return the changes of names, signatures and values, by module."""
    changes: list[Change] = []
    for name in dict.fromkeys([*old.modules, *new.modules]):
        before = old.modules.get(name, Module())
        after = new.modules.get(name, Module())
        changes += _module(name, before, after)
    return changes


def owners_of(change: Change, contract: Contract) -> list[str]:
    """Return the interfaces that a change belongs to: kinds whose module it is in, or that use its
    name, and extensions with its module."""
    module, _, path = change.name.partition(":")
    used = f"{module}:{path.partition('.')[0]}"
    kinds = [
        kind
        for kind, one in contract.kinds.items()
        if module == f"dovetail.api.{kind}" or used in one.uses
    ]
    return [*kinds, *(name for name, one in contract.extensions.items() if module in one.modules)]


def _module(module: str, old: Module, new: Module) -> Iterator[Change]:
    for name, type_before, type_after in _pairs(old.types, new.types):
        if type_before is None:
            yield Change("added", f"{module}:{name}", "class", True)
        elif type_after is None:
            yield Change("removed", f"{module}:{name}", "class", False)
        else:
            yield from _type(f"{module}:{name}", type_before, type_after)
    yield from _methods(f"{module}:", old.functions, new.functions, given=True)
    for name, before, after in _pairs(old.constants, new.constants):
        yield from _constant(f"{module}:{name}", before, after)


def _pairs(
    old: Mapping[str, Item], new: Mapping[str, Item]
) -> Iterator[tuple[str, Item | None, Item | None]]:
    for name in dict.fromkeys([*old, *new]):
        yield name, old.get(name), new.get(name)


def _constant(name: str, old: Constant | None, new: Constant | None) -> Iterator[Change]:
    if old is None:
        yield Change("added", name, "constant", True)
    elif new is None:
        yield Change("removed", name, "constant", False)
    elif old.value != new.value:
        grew = _words(old.value) < _words(new.value)
        yield Change("changed", name, f"{old.value} is now {new.value}", grew)


def _words(value: str | None) -> set[str]:
    """Return the values of a `Literal[…]`, or the types of a union; nothing for others."""
    node = ast.parse(value or "None", mode="eval").body
    if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("Literal"):
        items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return {ast.unparse(item) for item in items}
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _words_of_union(node)
    return set()


def _words_of_union(node: ast.expr) -> set[str]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _words_of_union(node.left) | _words_of_union(node.right)
    return {ast.unparse(node)}


def _type(name: str, old: Type, new: Type) -> Iterator[Change]:
    if old.form != new.form:
        yield Change("changed", name, f"{old.form} is now {new.form}", False)
    if old.bases != new.bases:
        was = ", ".join(old.bases) or "none"
        yield Change(
            "changed", name, f"bases {was} are now {', '.join(new.bases) or 'none'}", False
        )
    yield from _fields(name, old.fields, new.fields)
    if new.form == "value":
        yield from _order(name, old.fields, new.fields)
    yield from _methods(f"{name}.", old.methods, new.methods, given=new.given)
    yield from _members(name, old.members, new.members)


def _members(owner: str, old: Mapping[str, Member], new: Mapping[str, Member]) -> Iterator[Change]:
    for name, before, after in _pairs(old, new):
        if before is None:
            yield Change("added", f"{owner}.{name}", "member", True)
        elif after is None:
            yield Change("removed", f"{owner}.{name}", "member", False)
        elif before.value != after.value:
            said = f"{before.value} is now {after.value}"
            yield Change("changed", f"{owner}.{name}", said, False)


def _fields(owner: str, old: Mapping[str, Field], new: Mapping[str, Field]) -> Iterator[Change]:
    for name, before, after in _pairs(old, new):
        place = f"{owner}.{name}"
        if before is None and after is not None:
            yield Change("added", place, _field_text(after), after.default is not None)
        elif after is None:
            yield Change("removed", place, "field", False)
        elif before is not None and _shape(before) != _shape(after):
            only_default = (before.type, before.keyword) == (after.type, after.keyword)
            additive = only_default and (
                before.default is None or _declares_more(before.default, after.default)
            )
            said = f"{_field_text(before)} is now {_field_text(after)}"
            yield Change("changed", place, said, additive)


def _declares_more(old: str, new: str | None) -> bool:
    """Return True if a value is made with the same arguments and more: capabilities that a base
    class has besides."""
    before = ast.parse(old, mode="eval").body
    after = ast.parse(new or "None", mode="eval").body
    if not isinstance(before, ast.Call) or not isinstance(after, ast.Call):
        return False
    added = after.keywords[len(before.keywords) :]
    after.keywords = after.keywords[: len(before.keywords)]
    return bool(added) and ast.dump(before) == ast.dump(after)


def _order(owner: str, old: Mapping[str, Field], new: Mapping[str, Field]) -> Iterator[Change]:
    """Yield a change if a positional field isn't where the constructor of a value had it."""
    after = [name for name, field in new.items() if not field.keyword]
    before = [name for name, field in old.items() if name in after and not field.keyword]
    if after[: len(before)] != before:
        yield Change("changed", owner, "the order of fields; append new ones at the end", False)


def _shape(entry: Field | Parameter) -> tuple[str, str | None, bool]:
    return entry.type, entry.default, entry.keyword


def _field_text(field: Field) -> str:
    default = "" if field.default is None else f" = {field.default}"
    return f"{field.type or 'field'}{default}{', keyword-only' if field.keyword else ''}"


def _methods(
    owner: str, old: Mapping[str, Method], new: Mapping[str, Method], *, given: bool
) -> Iterator[Change]:
    for name, before, after in _pairs(old, new):
        place = f"{owner}{name}"
        if before is None and after is not None:
            yield Change("added", place, signature(after), given or not after.abstract)
        elif after is None:
            yield Change("removed", place, "method", False)
        elif before is not None and signature(before) != signature(after):
            said = f"{signature(before)} is now {signature(after)}"
            yield Change("changed", place, said, _takes_as_before(before, after, given))


def _takes_as_before(old: Method, new: Method, given: bool) -> bool:
    """Return True if only the obligation to implement it is gone, or, for what Dovetail implements,
    if parameters with defaults were appended."""
    same = (old.form, old.returns, old.asynchronous) == (new.form, new.returns, new.asynchronous)
    if not same or (new.abstract and not old.abstract):
        return False
    kept = new.parameters[: len(old.parameters)]
    more = new.parameters[len(old.parameters) :]
    unchanged = [(one.name, _shape(one)) for one in kept] == [
        (one.name, _shape(one)) for one in old.parameters
    ]
    return unchanged and (not more or (given and all(one.default is not None for one in more)))


def signature(method: Method) -> str:
    """Return a signature as in the source, with its form before it unless it is a plain one."""
    words = ["abstract"] if method.abstract else []
    words += ["async"] if method.asynchronous else []
    words += [method.form] if method.form not in ("method", "function") else []
    returns = f" -> {method.returns}" if method.returns else ""
    if method.form == "property":
        return " ".join(words) + returns
    return " ".join([*words, f"({', '.join(parameter_texts(method))}){returns}"])


def parameter_texts(method: Method, *, typed: bool = True) -> Iterator[str]:
    """Yield parameters as in the source, with types or without, and the star before keywords."""
    starred = False
    for one in method.parameters:
        if one.keyword and not starred:
            yield "*"
        starred = starred or one.keyword or one.name.startswith("*")
        kind = f": {one.type}" if one.type and typed else ""
        equals = " = " if typed else "="
        default = "" if one.default is None else f"{equals}{one.default}"
        yield f"{one.name}{kind}{default}"


def _suite_changes(old: Contract, new: Contract) -> Iterator[Change]:
    """Yield the changes of the suites' version, and of checks that apply to other components."""
    if old.suite != new.suite:
        yield Change("changed", "suite", f"{old.suite or 'none'} is now {new.suite}", True)
    for id, before in old.all_checks.items():
        after = new.all_checks.get(id, before)
        if _level(before) != _level(after):
            yield Change("changed", id, f"{_level(before)} is now {_level(after)}", True)


def _level(check: Check) -> str:
    level = "required" if check.capability is None else f"if {check.capability}"
    return f"{level} since {check.since}"


def _text_changes(old: Contract, new: Contract) -> Iterator[Change]:
    for what in ("clauses", "checks"):
        before = {**getattr(old, what)}
        after = {**getattr(new, what)}
        for kind in old.kinds.values():
            before |= getattr(kind, what)
        for kind in new.kinds.values():
            after |= getattr(kind, what)
        for name, known, present in _pairs(before, after):
            if known is None or present is None:
                entry = known or present
                act: Act = "added" if known is None else "removed"
                yield Change(act, name, getattr(entry, "text", getattr(entry, "help", "")), True)
