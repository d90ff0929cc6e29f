"""The interfaces that plugins and users build on don't change by accident."""

from __future__ import annotations

import difflib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.api import snapshot

SNAPSHOT = Path(__file__).with_name("signatures.txt")

RULE = """The public interface has changed. Within a minor version it only gains what is optional: a field or parameter with a default, a method that
isn't abstract, a new class. Anything else (a "-" line below, a new abstract method, a new parameter without a default) breaks plugins that were
written against it, and needs a new version of that kind in `dovetail.api.component.API_VERSIONS`.
If the change is meant, write it down:

    python -m tests.api.snapshot > tests/api/signatures.txt
"""


def difference() -> str:
    known, present = SNAPSHOT.read_text().splitlines(), "\n".join(snapshot.lines()).splitlines()
    return "\n".join(
        difflib.unified_diff(known, present, "signatures.txt", "the code", lineterm="", n=2)
    )


def test_public_signatures_are_those_written_down() -> None:
    changed = difference()
    if changed:
        pytest.fail(f"{RULE}\n{changed}", pytrace=False)


def test_a_change_shows_as_a_readable_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    from dovetail.api.scheduler import Scheduler

    def schedule(self, step: object, hint: int) -> None: ...  # type: ignore[no-untyped-def]

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    assert "-    abstract def schedule(self, step: Step) -> None" in difference()
    assert "+    def schedule(self, step: object, hint: int) -> None" in difference()


def test_the_snapshot_is_made_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None; from "
        "tests.api import snapshot; list(snapshot.lines())"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
