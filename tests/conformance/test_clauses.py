"""Every sentence of a contract is marked: checks or tests verify it, or it asks nothing."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest
from tools.clauses import page

from dovetail.api.component import KINDS
from dovetail.testing.checks import checks_of
from dovetail.testing.clauses import Subject, clauses_of, sentences
from dovetail.testing.suites import suite_for
from tests.docs.pages import DOCS

SUBJECTS: tuple[Subject, ...] = (*KINDS, "component")
TESTS = Path(__file__).parents[1]
EVERY = [clause for subject in SUBJECTS for clause in clauses_of(subject)]
CHECKS = {id for kind in KINDS for id in checks_of(suite_for(kind))}
NAMED = {check for clause in EVERY for check in clause.checks}


@cache
def names_in(file: str) -> set[str]:
    """The names of the tests of a file below `tests`."""
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, functions)}


def test_every_clause_that_requires_something_is_verified() -> None:
    unverified = [one for one in EVERY if one.requires and not one.verified]
    assert not unverified, (
        "give each a check with a mutant, or a test of Dovetail's own that keeps the promise; or "
        "let the sentence go"
    )


def test_every_test_that_is_named_exists() -> None:
    named = {test for clause in EVERY for test in clause.tests}
    assert named
    missing = [
        test
        for test in sorted(named)
        for file, _, name in (test.partition("::"),)
        if not (TESTS / file).is_file() or name not in names_in(file)
    ]
    assert not missing


def test_every_check_holds_a_clause_and_every_check_that_is_named_exists() -> None:
    assert NAMED == CHECKS


def test_the_page_of_clauses_is_current() -> None:
    assert (DOCS / "plugins" / "clauses.md").read_text(encoding="utf-8") == page(), (
        "run: python -m tools.clauses > docs/plugins/clauses.md"
    )


def test_a_new_sentence_is_a_clause_of_its_own() -> None:
    docstring = '"""One. Two\n    lines.\n\n        a drawing\n    """'
    source = (
        f"class A:\n    {docstring}\n\n    x: int = 1  # a comment\n    def f(self):\n        "
        f'"`Three`. Four."\n    y: int = 2\n    "Five. Six."\n'
    )
    own = [
        ("A", "One."),
        ("A", "Two lines."),
        ("A.x", "a comment"),
        ("A.f", "`Three`."),
        ("A.f", "Four."),
        ("A.y", "Five."),
        ("A.y", "Six."),
    ]
    assert list(sentences(source)) == own


def test_a_mark_that_fits_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from dovetail.testing.clauses import TOLD, observer

    monkeypatch.setattr(observer, "CLAUSES", {**observer.CLAUSES, "Observer.on_gone": TOLD})
    with pytest.raises(ValueError, match="on_gone"):
        clauses_of("observer")
    monkeypatch.setattr(observer, "CLAUSES", {"module": TOLD})
    with pytest.raises(ValueError, match="nothing says which check holds it"):
        clauses_of("observer")
