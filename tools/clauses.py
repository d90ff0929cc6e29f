"""Generates docs/plugins/clauses.md: every sentence of the contracts that requires something of a
component, or promises something to it, with the checks and tests that verify it; and all checks.

Run `python -m tools.clauses > docs/plugins/clauses.md` to update it. The page is committed, so that
it can be read without building the site.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from tools.docs_hooks import KIND_TITLES

from dovetail.api.component import KINDS
from dovetail.testing.checks import Check, checks_of
from dovetail.testing.clauses import Clause, Subject, clauses_of
from dovetail.testing.suites import suite_for

HEAD = """# Clauses and checks

<!-- Written by `python -m tools.clauses`. Change the contract, or core/dovetail/testing/clauses, and run it again. -->

Every sentence of the contract of each kind that requires something of a component, or promises something to it, and the checks of its
[suite](conformance.md) that verify it. Sentences that only describe, advise or define a term are omitted: {told} of {all}.
Of the other {asked}, {held} are verified by a check, {partly} of them in part, and {tested} only by tests of Dovetail (in its folder `tests`):
promises to components, and clauses about what only Dovetail's own components do. {unchecked} are verified by none. The list gives the reasons.
"""


def page() -> str:
    """Return the page's text."""
    subjects: tuple[Subject, ...] = (*KINDS, "component")
    clauses = {subject: clauses_of(subject) for subject in subjects}
    every = [clause for some in clauses.values() for clause in some]
    asked = [clause for clause in every if clause.requires]
    held = [clause for clause in asked if clause.checks]
    counts = {
        "all": len(every),
        "told": len(every) - len(asked),
        "asked": len(asked),
        "held": len(held),
        "tested": sum(bool(clause.tests) and not clause.checks for clause in asked),
        "unchecked": sum(not clause.verified for clause in asked),
    }
    lines = [
        HEAD.format(
            **counts,
            partly=sum(bool(clause.why) for clause in held),
        )
    ]
    for kind in KINDS:
        lines += [
            f"## {KIND_TITLES[kind]}\n",
            *_clauses(clauses[kind]),
            "",
            *_checks(kind, checks_of(suite_for(kind)).values(), every),
            "",
        ]
    lines += ["## Components of all kinds\n", *_clauses(clauses["component"]), ""]
    lines += _checks("hygiene", checks_of(suite_for("scheduler")).values(), every)
    return "\n".join(lines) + "\n"


def _clauses(clauses: Iterable[Clause]) -> Iterator[str]:
    yield from ("| of | the contract says | verified by |", "|---|---|---|")
    for clause in clauses:
        if clause.requires:
            yield f"| {_place(clause.place)} | {_cell(clause.text)} | {_verified_by(clause)} |"


def _verified_by(clause: Clause) -> str:
    by = [f"`{check}`" for check in clause.checks]
    by += [f"test `{test}`" for test in clause.tests]
    if not clause.why:
        return ", ".join(by)
    return f"{', '.join(by)}; in part: {clause.why}" if by else f"**not checked**: {clause.why}"


def _checks(group: str, checks: Iterable[Check], clauses: Iterable[Clause]) -> Iterator[str]:
    yield from ("| check | level | verifies a clause of | a failure means |", "|---|---|---|---|")
    for check in checks:
        if check.id.startswith(f"{group}."):
            places = dict.fromkeys(
                _place(clause.place) for clause in clauses if check.id in clause.checks
            )
            yield f"| `{check.id}` | {check.level} | {', '.join(places)} | {_cell(check.help)} |"


def _place(place: str) -> str:
    return "the file" if place == "module" else f"`{place}`"


def _cell(text: str) -> str:
    return (
        text.replace("|", "\\|").replace("<", "&lt;")
        if "`" not in text
        else text.replace("|", "\\|")
    )


if __name__ == "__main__":
    sys.stdout.write(page())
