"""The search for the highest rate: it finds it, to its tolerance, and notices where its assumption
fails."""

from __future__ import annotations

import html
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.errors import ConfigError
from dovetail_lab.capacity import MAX_DOUBLINGS, find_capacity
from dovetail_lab.capacity_command import _cautions
from dovetail_lab.records import RunResult
from dovetail_lab.report.capacity_page import capacity_page
from dovetail_lab.report.curves import Table
from dovetail_lab.slo import parse_slo
from tests.lab.commands import lab, write_engine
from tests.lab.made_runs import run_of_ttfts
from tests.support import examples

SLO = parse_slo("ttft_p99<1")


def breaks_above(*limits: float) -> Callable[[float], list[RunResult]]:
    """Objectives hold below the first limit, fail up to the second, hold up to the third, ..."""
    return lambda scale: [
        run_of_ttfts([2.0 if sum(scale > limit for limit in limits) % 2 else 0.5])
    ]


@examples(quick=60, full=500)
@given(
    limit=st.floats(0.01, 100),
    start=st.floats(0.1, 10),
    tolerance=st.sampled_from([0.005, 0.02, 0.2]),
)
def test_the_limit_is_found_to_the_tolerance(limit: float, start: float, tolerance: float) -> None:
    found = find_capacity(breaks_above(limit), SLO, tolerance=tolerance, start=start)
    assert found.scale is not None
    assert found.scale <= limit <= found.scale * (1 + tolerance)
    assert found.monotone
    assert not found.open_ended
    assert [trial.scale for trial in found.trials] == sorted(
        {trial.scale for trial in found.trials}
    )


def test_a_rate_that_meets_above_one_that_misses_is_noticed_and_not_believed() -> None:
    found = find_capacity(breaks_above(0.7, 0.85, 1.5), SLO)
    assert not found.monotone
    assert found.scale is not None
    assert found.scale <= 0.7


def test_what_always_holds_has_no_end() -> None:
    found = find_capacity(lambda scale: [run_of_ttfts([0.1])], SLO)
    assert (found.scale, found.open_ended) == (2.0**MAX_DOUBLINGS, True)


def test_what_never_holds_has_no_capacity() -> None:
    found = find_capacity(lambda scale: [run_of_ttfts([9.0])], SLO)
    assert (found.scale, found.open_ended) == (None, False)


@pytest.mark.parametrize(
    ("tolerance", "start"), [(0.0, 1.0), (2.0, 1.0), (0.02, 0.0), (0.02, float("nan"))]
)
def test_a_senseless_search_is_refused(tolerance: float, start: float) -> None:
    with pytest.raises(ConfigError):
        find_capacity(breaks_above(1.0), SLO, tolerance=tolerance, start=start)


WORKLOAD = "requests=20 arrivals=poisson(2) prompt=fixed(100) output=fixed(20)"


@pytest.mark.slow("simulates many trials")
@pytest.mark.usefixtures("no_figures")
def test_the_command_prints_the_rate_and_every_trial(tmp_path: Path) -> None:
    engine = write_engine(tmp_path / "fcfs.yaml")
    said = lab(
        "capacity",
        engine,
        "--trace",
        WORKLOAD,
        "--slo",
        "ttft_p99<1",
        "--tolerance",
        "0.3",
        "--out",
        tmp_path / "out",
    )
    assert "requests/s" in said
    assert "meet ttft_p99<1; tolerance 30 %" in said
    table = (tmp_path / "out" / "capacity.csv").read_text().splitlines()
    assert table[0] == "policy,scale_rate,requests_per_s,ttft_p99_s,ttft_p99_within,met,capacity"
    assert sum(line.endswith(",yes,yes") for line in table) == 1
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<svg") == 2
    assert said.splitlines()[-2] in html.unescape(page).replace("\N{NO-BREAK SPACE}", " ")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "report.html",
        "rates.png",
        "objectives.png",
        "capacity.csv",
    }


def test_the_page_marks_the_rate_found_and_every_trial() -> None:
    found = {
        name: find_capacity(breaks_above(limit), SLO, tolerance=0.2)
        for name, limit in (("a", 1.5), ("b", 0.001))
    }
    drawings = capacity_page(
        found,
        SLO,
        10.0,
        [],
        trace="t",
        answers=[],
        cautions=[],
        table=Table([], []),
        command="",
        files={},
    ).drawings
    (axes,) = drawings[0].figure.axes
    curves = [line for line in axes.lines if len(line.get_xdata()) > 2]
    assert [line.get_xdata().tolist() for line in curves] == [
        [10 * trial.scale for trial in one.trials] for one in found.values()
    ]
    upright = [line.get_xdata()[0] for line in axes.lines if list(line.get_ydata()) == [0, 1]]
    assert upright == [10 * one.scale for one in found.values() if one.scale is not None]


@pytest.mark.parametrize(
    ("seeded", "remedy"),
    [(True, "a longer trace or more seeds would"), (False, "a longer trace would")],
)
def test_more_seeds_are_advised_only_where_they_bring_other_traffic(
    seeded: bool, remedy: str
) -> None:
    (caution,) = _cautions(find_capacity(breaks_above(0.7, 0.85, 1.5), SLO), seeded)
    assert remedy in caution


def test_one_request_has_no_rate_to_scale(tmp_path: Path) -> None:
    said = lab(
        "capacity",
        write_engine(tmp_path / "a.yaml"),
        "--trace",
        WORKLOAD,
        "--slice",
        "0:1",
        "--slo",
        "ttft_p99<1",
        fails=True,
    )
    assert "there is no rate to scale" in said
