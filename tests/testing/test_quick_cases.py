"""The table of quick cases names tests that exist, and a test that would lose all of its quick
cases is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import slow_checks
from tests.quick_cases import QUICK_CASES
from tests.slow_checks import LIKE_OTHERS, reason_for, without_a_quick_case

TESTS = Path(__file__).parents[1]


@pytest.fixture
def one_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_checks, "QUICK_CASES", {"a/test_b.py": {"test_c": ("1", "x-")}})


def test_each_named_test_exists() -> None:
    missing = [
        f"{file}::{test}"
        for file, tests in QUICK_CASES.items()
        for test in tests
        if f"def {test.rpartition('::')[2]}(" not in (TESTS / file).read_text(encoding="utf-8")
    ]
    assert missing == []


@pytest.mark.usefixtures("one_is_quick")
def test_cases_that_are_not_named_are_slow() -> None:
    reasons = [reason_for(f"tests/a/test_b.py::test_c[{case}]") for case in ("1", "x-2", "2", "x")]
    assert reasons == [None, None, LIKE_OTHERS, LIKE_OTHERS]
    assert reason_for("tests/a/test_b.py::test_d[2]") is None


@pytest.mark.usefixtures("one_is_quick")
def test_a_test_without_a_quick_case_is_found() -> None:
    other = "tests/a/test_b.py::test_d[2]"
    assert without_a_quick_case(["tests/a/test_b.py::test_c[3]", other]) == [
        "tests/a/test_b.py::test_c"
    ]
    assert without_a_quick_case([f"tests/a/test_b.py::test_c[{case}]" for case in "13"]) == []
