"""Clauses of the contracts and the checks that verify them: a module per kind, sentence by sentence
of `dovetail.api.<kind>`.

    CLAUSES = {
        "AttentionLayer.write": held("values", "write_first"),         # every sentence of this docstring
        "AttentionBackend.plan": {                                    # sentences that contain these words
            "once a step": TOLD,
            "must not allocate": held("graph", but="a wait that changes no value isn't detected"),
        },
        "AttentionBackend.prepare": promised("runtime/test_worker.py::test_…"),
    }

A place is a class, a method or a field (for its comment); "module" is the file's own docstring. A
class's mark also applies to its fields, unless they have one. `"*"` is the default of a place or
file. `tools/clauses.py` generates the page docs/plugins/clauses.md from this, and a test requires
that every sentence is marked."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from itertools import zip_longest
from typing import Literal

from dovetail.api.component import Kind

Subject = Kind | Literal["component"]  # a file of `dovetail.api`; the last is for all kinds


@dataclass(frozen=True, slots=True)
class Mark:
    """How a sentence is verified. `checks`: names of checks of the kind (or "hygiene.…"). `tests`:
    Dovetail's own tests, below its folder `tests`. `why`: the reason why it, or a part of it, can't
    be checked. None of them: it requires nothing, but describes, advises or defines a term."""

    checks: tuple[str, ...] = ()
    why: str = ""
    tests: tuple[str, ...] = ()


Marks = Mapping[str, Mark | Mapping[str, Mark]]

TOLD = Mark()


def held(*checks: str, but: str = "") -> Mark:
    """Mark a clause that these checks verify. `but`: the part that they don't cover."""
    return Mark(checks, but)


def promised(*tests: str, by: tuple[str, ...] = ()) -> Mark:
    """Mark a promise of Dovetail to components, or a clause about what only its own components do:
    these tests of Dovetail verify it, each "folder/test_file.py::test_name". `by`: checks that
    verify the component's part."""
    return Mark(by, tests=tests)


@dataclass(frozen=True, slots=True)
class Clause:
    """A sentence of a contract. `checks` are full ids."""

    place: str
    text: str
    checks: tuple[str, ...]
    why: str = ""
    tests: tuple[str, ...] = ()

    @property
    def requires(self) -> bool:
        """True if it requires something that a check or a test can verify."""
        return bool(self.checks or self.tests or self.why)

    @property
    def verified(self) -> bool:
        return bool(self.checks or self.tests)


def clauses_of(kind: Subject) -> list[Clause]:
    """Return every sentence of a contract with its mark, in source order. Raises `ValueError` for a
    sentence without a mark, and for unused marks."""
    module = import_module(f"dovetail.api.{kind}")
    marks: Marks = import_module(f"{__name__}.{kind}").CLAUSES
    unused = {
        (place, words)
        for place, mark in marks.items()
        for words in (("*",) if isinstance(mark, Mark) else mark)
    }
    found = []
    for place, text in sentences(inspect.getsource(module)):
        at, words, mark = _mark_of(marks, place, text)
        unused.discard((at, words))
        checks = tuple(check if "." in check else f"{kind}.{check}" for check in mark.checks)
        found.append(Clause(place, text, checks, mark.why, mark.tests))
    if unused:
        raise ValueError(f"clauses of {kind}: nothing says {sorted(unused)}")
    return found


def _mark_of(marks: Marks, place: str, text: str) -> tuple[str, str, Mark]:
    for at in (place, place.partition(".")[0], "*"):
        mark = marks.get(at)
        if isinstance(mark, Mark):
            return at, "*", mark
        if mark is not None:
            for words, one in mark.items():
                if words in text or words == "*":
                    return at, words, one
    raise ValueError(f"{place} says {text!r}, and nothing says which check holds it")


def sentences(source: str) -> Iterator[tuple[str, str]]:
    """Yield (place, sentence) of the docstrings of a file's public classes, methods and fields, and
    of the comments beside fields without one."""
    tree = ast.parse(source)
    lines = source.splitlines()
    yield from _split("module", ast.get_docstring(tree))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _split(node.name, ast.get_docstring(node))
            for part, after in zip_longest(node.body, node.body[1:]):
                if isinstance(part, ast.FunctionDef):
                    yield from _split(f"{node.name}.{part.name}", ast.get_docstring(part))
                elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                    told = (
                        after.value.value
                        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                        else None
                    )
                    yield from _split(
                        f"{node.name}.{part.target.id}",
                        inspect.cleandoc(told) if isinstance(told, str) else _comment(lines, part),
                    )


def _comment(lines: list[str], field: ast.AnnAssign) -> str:
    """Return the comments beside the lines of a field, and on the lines right above it."""
    above: list[str] = []
    for line in reversed(lines[: field.lineno - 1]):
        if not line.strip().startswith("# "):
            break
        above.insert(0, line.strip()[2:])
    own_lines = lines[field.lineno - 1 : field.end_lineno]
    beside = [line.partition("  # ")[2] for line in own_lines]
    return " ".join([*above, *filter(None, beside)])


def _split(place: str, text: str | None) -> Iterator[tuple[str, str]]:
    for paragraph in (text or "").split("\n\n"):
        if not paragraph.startswith("    "):  # skip drawings
            yield from (
                (place, sentence)
                for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z`\"])", " ".join(paragraph.split()))
                if sentence
            )
