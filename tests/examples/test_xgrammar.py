"""The example `dovetail-xgrammar`: its own tests, and the suite of its kind over the backend.
`tests/third_party.sh` installs it."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from dovetail.testing.checks import Absent, Untried, checks_of
from dovetail.testing.suites.grammar import GrammarSuite

PACKAGE = Path(__file__).parents[2] / "examples/plugins/dovetail-xgrammar"
sys.path.insert(0, str(PACKAGE / "src"))

OF_ALL_KINDS = {"hygiene.spawn", "hygiene.declaration"}  # third_party.sh runs the whole suite


@pytest.fixture(scope="session", autouse=True)
def _the_library_is_imported() -> None:
    __import__("dovetail_xgrammar.backend")


THEIRS = runpy.run_path(str(PACKAGE / "tests/test_xgrammar.py"))
globals().update({name: value for name, value in THEIRS.items() if name.startswith("test_")})
backend = THEIRS["backend"]


@pytest.mark.parametrize(
    "check",
    [check for id, check in checks_of(GrammarSuite).items() if id not in OF_ALL_KINDS],
    ids=lambda check: check.id,
)
def test_the_backend_passes_its_suite(check: object) -> None:
    from dovetail_xgrammar.backend import XGrammar

    suite = type("Suite", (GrammarSuite,), {"component": XGrammar})
    try:
        getattr(suite(), check.attribute)()  # type: ignore[attr-defined]
    except (Absent, Untried) as reason:
        pytest.skip(str(reason))
