"""`raised_at` returns the line of a plugin at which an error was raised, for messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.errors import raised_at

OWN = "def check(value):\n    raise KeyError(value)\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An importable package that raises in line 2."""
    (tmp_path / "raises_own.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "raises_own"


def caught(package: str, *, wraps: bool) -> Exception:
    """Return what its function raises, or an error that was raised elsewhere because of it."""
    check = __import__(package).check
    try:
        try:
            check("x")
        except KeyError as error:
            if not wraps:
                raise
            raise ValueError("elsewhere") from error
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("wraps", [False, True])
def test_the_line_of_the_package_is_found_in_the_error_or_in_its_cause(
    package: str, wraps: bool
) -> None:
    place = raised_at(caught(package, wraps=wraps), package)
    assert place.endswith("raises_own.py:2")


def test_an_error_of_others_has_no_place(package: str) -> None:
    assert raised_at(caught(package, wraps=True), "another_package") == ""
