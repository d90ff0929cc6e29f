"""The tables of quick and slow cases name tests that exist, and a test that would lose all of them
is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import slow_checks
from tests.quick_cases import QUICK_CASES, SLOW_CASES
from tests.slow_checks import (
    LIKE_OTHERS,
    is_tried_with_another,
    reason_for,
    without_a_case,
)

TESTS = Path(__file__).parents[1]


@pytest.fixture
def one_is_quick_and_one_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_checks, "QUICK_CASES", {"a/test_b.py": {"test_c": ("1", "x-")}})
    monkeypatch.setattr(slow_checks, "SLOW_CASES", {"a/test_b.py": {"test_c": ("2",)}})


def test_each_named_test_exists() -> None:
    missing = [
        f"{file}::{test}"
        for file, tests in (*QUICK_CASES.items(), *SLOW_CASES.items())
        for test in tests
        if f"def {test.rpartition('::')[2]}(" not in (TESTS / file).read_text(encoding="utf-8")
    ]
    assert missing == []


@pytest.mark.usefixtures("one_is_quick_and_one_slow")
def test_cases_that_are_not_named_are_slow() -> None:
    reasons = [reason_for(f"tests/a/test_b.py::test_c[{case}]") for case in ("1", "x-2", "2", "x")]
    assert reasons == [None, None, LIKE_OTHERS, LIKE_OTHERS]
    assert reason_for("tests/a/test_b.py::test_d[2]") is None


@pytest.mark.usefixtures("one_is_quick_and_one_slow")
def test_slow_cases_that_are_not_named_are_left_to_the_full_profile() -> None:
    ids = [f"tests/a/test_b.py::test_c[{case}]" for case in ("2", "23", "3", "x")]
    assert [is_tried_with_another(id) for id in ids] == [False, False, True, True]
    assert not is_tried_with_another("tests/a/test_b.py::test_d[3]")


@pytest.mark.usefixtures("one_is_quick_and_one_slow")
def test_a_test_without_a_case_of_a_profile_is_found() -> None:
    of, other = "tests/a/test_b.py::test_c", "tests/a/test_b.py::test_d[2]"
    assert without_a_case([f"{of}[3]", other]) == [f"{of} (quick)", f"{of} (slow)"]
    assert without_a_case([f"{of}[2]", other]) == [f"{of} (quick)"]
    assert without_a_case([f"{of}[{case}]" for case in "123"]) == []
