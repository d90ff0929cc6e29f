"""Fixtures that several tests of the lab share."""

from __future__ import annotations

from contextlib import suppress

import pytest

from dovetail.errors import MissingExtraError


@pytest.fixture(autouse=True, scope="session")
def what_reports_need_is_imported() -> None:
    """Matplotlib and scipy are imported late, and would count for the first test that writes a
    report."""
    with suppress(ImportError, MissingExtraError):
        import dovetail_lab.planned_runs
        import dovetail_lab.report.capacity_page
        import dovetail_lab.report.page
        import dovetail_lab.step_error  # noqa: F401


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made, but neither laid out nor rendered, which takes most of a report's time: for
    tests of everything else."""
    monkeypatch.setattr("dovetail_lab.report.html.lay_out", lambda figure: None)
    monkeypatch.setattr("dovetail_lab.report.html.png", lambda figure: b"")
    monkeypatch.setattr("dovetail_lab.report.html.svg", lambda figure, prefix: "<svg></svg>")
