"""Finds classes and their bases in the sources of installed modules, without importing them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from dovetail.registry.contract.document import Contract, Type
from dovetail.registry.contract.source import last_name

# modules whose classes add no members that a contract knows
NEUTRAL = ("abc", "builtins", "collections.abc", "enum", "typing", "typing_extensions")
LONGEST_CHAIN = 20  # re-exports followed for one name


def source_of(module: str) -> Path | None:
    """Return the file of an installed module; None if it isn't there, or isn't Python source. No
    package is imported, except by an import hook that needs it."""
    top, *rest = module.split(".")
    try:
        spec: ModuleSpec | None = find_spec(top)
    except (ImportError, ValueError):  # ValueError: a module without a spec, such as `__main__`
        return None
    name = top
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return Path(spec.origin)


@dataclass(frozen=True, slots=True)
class Own:
    """A class of a component's package."""

    module: str
    node: ast.ClassDef


@dataclass(frozen=True, slots=True)
class Api:
    """A class of the contract."""

    name: str
    type: Type


Ancestor = Own | Api


@dataclass(frozen=True, slots=True)
class Lineage:
    """A class with its bases, in the order in which Python looks names up. `closed`: all bases were
    found."""

    classes: tuple[Ancestor, ...]
    closed: bool


@dataclass
class _Source:
    """Top level of one module: its classes, and where its other names come from."""

    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)  # name -> module, name there


class Modules:
    """Sources of modules, parsed once. `given`: sources by module name that are used instead of
    installed ones."""

    def __init__(self, contract: Contract, given: dict[str, str] | None = None) -> None:
        self._contract = contract
        self._given = given or {}
        self._parsed: dict[str, _Source | None] = {}

    def classes_of(self, module: str) -> Sequence[Own]:
        """Return the classes that a module defines; none if it isn't found or isn't Python."""
        source = self._source(module)
        return [] if source is None else [Own(module, node) for node in source.classes.values()]

    def imports_of(self, module: str) -> list[tuple[str, str]]:
        """Return the module and the name of each `from … import …` in a module."""
        source = self._source(module)
        return [] if source is None else [one for one in source.imports.values() if one[1]]

    def find(self, module: str, name: str) -> Ancestor | None:
        """Return the class that a module's name means, also if it is imported there; None if it
        isn't found."""
        for _ in range(LONGEST_CHAIN):
            known = self._contract.type_named(module, name)
            if known is not None:
                return Api(name, known)
            source = self._source(module)
            if source is None:
                return None
            if name in source.classes:
                return Own(module, source.classes[name])
            if name not in source.imports:
                return None
            module, name = source.imports[name]
        return None

    def lineage(self, start: Own) -> Lineage:
        """Return a class with its bases."""
        walked: list[Ancestor] = []
        closed = self._walk(start, walked, depth=0)
        # a base that several classes share comes after all of them
        kept = [one for at, one in enumerate(walked) if one not in walked[at + 1 :]]
        return Lineage(tuple(kept), closed)

    def _walk(self, ancestor: Ancestor, walked: list[Ancestor], depth: int) -> bool:
        walked.append(ancestor)
        if depth > LONGEST_CHAIN:
            return False
        closed = True
        for module, name in self._bases(ancestor):
            if module in NEUTRAL or name in ("object", "Generic"):
                continue
            base = self.find(module, name)
            if base is None:
                closed = False
            else:
                closed = self._walk(base, walked, depth + 1) and closed
        return closed

    def _bases(self, ancestor: Ancestor) -> Iterator[tuple[str, str]]:
        """Yield the module and the name of each base."""
        if isinstance(ancestor, Own):
            source = self._source(ancestor.module) or _Source()
            for base in ancestor.node.bases:
                yield _place(base, ancestor.module, source)
            return
        for text in ancestor.type.bases:
            name = last_name(ast.parse(text, mode="eval").body)
            homes = [home for home, one in self._contract.modules.items() if name in one.types]
            yield (homes[0] if homes else "typing"), name

    def _source(self, module: str) -> _Source | None:
        if module not in self._parsed:
            self._parsed[module] = self._read(module)
        return self._parsed[module]

    def _read(self, module: str) -> _Source | None:
        if module in self._given:
            return _parse(self._given[module], module, is_package=False)
        path = source_of(module)
        if path is None:
            return None
        try:
            text = path.read_text(encoding="utf-8")
            return _parse(text, module, is_package=path.name == "__init__.py")
        except (OSError, SyntaxError, ValueError):  # importing it says more
            return None


def _parse(text: str, module: str, *, is_package: bool) -> _Source:
    tree = ast.parse(text)
    source = _Source()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                local = alias.asname or alias.name.partition(".")[0]
                source.imports[local] = (alias.name if alias.asname else local, "")
        elif isinstance(node, ast.ImportFrom):
            home = _absolute(node, module, is_package)
            for alias in node.names:
                source.imports[alias.asname or alias.name] = (home, alias.name)
    source.classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    return source


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """Return the absolute name of the module that a `from … import` names."""
    if node.level == 0:
        return node.module or ""
    parts = module.split(".")
    up = node.level - 1 if is_package else node.level
    parent = parts[: len(parts) - up]
    return ".".join([*parent, *([node.module] if node.module else [])])


def _place(base: ast.expr, module: str, source: _Source) -> tuple[str, str]:
    """Return the module and name that a base class is imported by."""
    node = base.value if isinstance(base, ast.Subscript) else base
    if isinstance(node, ast.Name):
        if node.id in source.classes:
            return module, node.id
        home, name = source.imports.get(
            node.id, ("builtins" if node.id == "object" else module, node.id)
        )
        return home, name or node.id
    if isinstance(node, ast.Attribute):
        first, *rest = ast.unparse(node.value).split(".")
        home, name = source.imports.get(first, (first, ""))
        return ".".join(filter(None, [home, name, *rest])), node.attr
    return "", ""
