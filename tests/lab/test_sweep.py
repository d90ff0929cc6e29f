"""Sweeps: the grid is right, the rows are the runs', and processes change nothing."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from dovetail.errors import ConfigError
from dovetail_lab.planned_runs import display_names
from dovetail_lab.report.curves import Curves, Table
from dovetail_lab.report.engine import Engine
from dovetail_lab.report.style import MARKERS, PAPER
from dovetail_lab.report.sweep_page import sweep_page
from dovetail_lab.slo import parse_slo
from dovetail_lab.sweep import (
    RATE,
    GridPoint,
    GridResult,
    averaged,
    figures,
    grid,
    parse_axis,
    table_of,
)
from tests.lab.commands import lab, write_engine
from tests.lab.made_runs import record, rejected, run, run_of_ttfts
from tests.lab.test_report import assert_complete

WORKLOAD = "requests=12 arrivals=poisson(8) prompt=uniform(20, 200) output=fixed(10)"


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    return write_engine(tmp_path / "priority.yaml", "priority")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("max_num_seqs=1,2", ("1", "2")),
        (
            "kv_cache={name: prefix, reuse: true},{name: prefix, reuse: false}",
            ("{name: prefix, reuse: true}", "{name: prefix, reuse: false}"),
        ),
        ('scheduler="a,b",c', ('"a,b"', "c")),
    ],
)
def test_values_are_parted_at_commas_outside_brackets_and_quotes(
    text: str, values: tuple[str, ...]
) -> None:
    assert parse_axis(text).values == values


@pytest.mark.parametrize(
    "text", ["max_num_seqs", "=1,2", "max_num_seqs=", "max_num_seqs=1,,2", "max_num_seqs=1,1"]
)
def test_a_malformed_axis_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        parse_axis(text)


def test_the_grid_has_every_combination_once() -> None:
    points = list(grid([parse_axis("a=1,2"), parse_axis("b=x,y,z")], range(2)))
    assert len({(*point.values.values(), point.seed) for point in points}) == len(points) == 12
    assert points[0] == GridPoint({"a": "1", "b": "x"}, 0)
    with pytest.raises(ConfigError, match="a is given twice"):
        list(grid([parse_axis("a=1"), parse_axis("a=2")], range(1)))


def test_a_row_without_completed_requests_is_empty_and_misses() -> None:
    nobody = run([rejected(0)])
    found = figures(nobody, parse_slo("ttft_p99<1"))
    assert math.isnan(found["ttft_p99"])
    assert (found["completed"], found["rejected"], found["slo_met"]) == (0, 1, 0)
    assert (found["slo_ttft_p99"], found["slo_ttft_p99_within"]) == (math.inf, 0)
    text = table_of([GridResult(GridPoint({"a": "1"}, 0), found, Engine.of("a", [nobody]))])
    assert ",,," in text
    assert ",inf," in text


def test_averages_are_over_seeds_only() -> None:
    runs = [
        (value, run_of_ttfts([ttft], seed=seed))
        for value, seed, ttft in (("1", 0, 1.0), ("1", 1, 3.0), ("2", 0, 5.0))
    ]
    rows = [
        GridResult(GridPoint({"a": value}, one.seed), figures(one), Engine.of("a", [one]))
        for value, one in runs
    ]
    assert [row.figures["ttft_mean"] for row in averaged(rows)] == pytest.approx([2.0, 5.0])


def swept(engine: Path, out: Path, jobs: int) -> dict[str, bytes]:
    """Files that a sweep over two settings and two rates writes."""
    grid_of = ["--set", "scheduler.aging_s=1,5", "--rates", "1,4", "--slo", "ttft_p99<0.1"]
    said = lab("sweep", engine, "--trace", WORKLOAD, *grid_of, "--out", out, "--jobs", jobs)
    assert f"written: {out}/report.html" in said
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.mark.slow("starts processes, and renders all figures twice")
def test_processes_change_no_byte_of_the_table_or_the_page(engine: Path, tmp_path: Path) -> None:
    one, two = (swept(engine, tmp_path / str(jobs), jobs) for jobs in (1, 2))
    assert one == two
    page = one["report.html"].decode()
    assert_complete(page)
    assert page.count("<svg") == 2
    for text in (
        "scheduler.aging_s=5",
        "requests/s that arrive",
        "scale_<wbr>rate",
        "TTFT within 0.1 s",
    ):
        assert text in page


@pytest.mark.slow("simulates every combination")
@pytest.mark.usefixtures("no_figures")
def test_the_table_and_the_page_have_every_combination(engine: Path, tmp_path: Path) -> None:
    written = swept(engine, tmp_path / "out", 1)
    assert set(written) == {"report.html", "rates.png", "objectives.png", "sweep.csv"}
    rows = list(csv.DictReader(written["sweep.csv"].decode().splitlines()))
    assert [(row["scheduler.aging_s"], row["scale_rate"], row["completed"]) for row in rows] == [
        ("1", "1", "12"),
        ("1", "4", "12"),
        ("5", "1", "12"),
        ("5", "4", "12"),
    ]
    page = written["report.html"].decode()
    assert_complete(page)
    assert page.count("<svg") == 2
    assert "4 combinations of scheduler.aging_s, scale_rate" in page


def rows(
    axis: str, values: Sequence[str], others: Sequence[str], slo: str = "ttft_p99<1"
) -> list[GridResult]:
    """A grid of runs made by hand: the larger the axis' value, the more requests a second, and the
    longer their wait."""
    made = []
    for other in others:
        for index, value in enumerate(values, start=1):
            one = run(record(i, 0.3 * index, arrival_s=i / index) for i in range(10))
            made.append(
                GridResult(
                    GridPoint({axis: value, "scheduler": other}, 0),
                    figures(one, parse_slo(slo)),
                    Engine.of("e", [one]),
                )
            )
    return made


def page_of(grid_rows: list[GridResult], slo: str = "ttft_p99<1") -> Curves:
    return sweep_page(
        "e",
        "made",
        grid_rows,
        parse_slo(slo),
        1,
        Table(["scheduler"], [["fcfs"]]),
        "dovetail lab sweep",
        {},
    )


def test_curves_are_drawn_over_the_rate_at_which_requests_arrive() -> None:
    page = page_of(rows(RATE, ["1", "2", "4"], ["fcfs", "vtc"]))
    assert [drawing.name for drawing in page.drawings] == ["rates", "objectives"]
    panels = {
        axes.get_title(loc="left"): axes
        for axes in page.drawings[0].figure.axes
        if axes.get_visible()
    }
    assert set(panels) == {
        "p99 TTFT, s",
        "p99 TPOT, s",
        "p99 ITL, s",
        "mean E2E, s",
        "output tokens/s",
    }
    curve = panels["p99 TTFT, s"].lines[0]
    assert curve.get_xdata() == pytest.approx([10 / 9 * 0.9, 2, 3])
    assert curve.get_ydata() == pytest.approx([0.3, 0.6, 0.9])
    assert any(
        list(line.get_ydata()) == [1.0, 1.0] and line.get_linestyle() == "--"
        for line in panels["p99 TTFT, s"].lines
    )  # the limit
    assert [text.get_text() for text in page.drawings[0].figure.legends[0].get_texts()] == [
        "scheduler=fcfs",
        "scheduler=vtc",
    ]


def test_without_rates_the_first_setting_that_is_a_number_is_the_axis() -> None:
    page = page_of(rows("max_num_seqs", ["8", "32"], ["fcfs", "vtc"]))
    assert page.drawings[0].figure.axes[0].lines[0].get_xdata() == pytest.approx([8, 32])
    none = page_of(rows("executor", ["a", "b"], ["fcfs", "vtc"]))
    assert not none.drawings
    assert "There is no figure" in none.absent


def test_a_share_is_judged_for_objectives_on_percentiles_alone() -> None:
    grid_rows = rows(RATE, ["1", "2", "4"], ["fcfs"], "ttft_p50<0.5,e2e_mean<9")
    within = page_of(grid_rows, "ttft_p50<0.5,e2e_mean<9").drawings[1].figure.axes
    assert [axes.get_title(loc="left") for axes in within] == ["TTFT within 0.5 s"]
    assert within[0].lines[0].get_ydata() == pytest.approx([1, 0, 0])
    filled = [
        line.get_markerfacecolor() != PAPER
        for line in within[0].lines
        if line.get_marker() == MARKERS[0]
    ]
    assert filled == [True, False, False]


def test_what_was_never_served_is_an_arrow_not_a_point() -> None:
    runs = [
        run([*(record(i, 0.2) for i in range(9)), *map(rejected, range(9, 9 + lost))])
        for lost in (0, 5)
    ]
    grid_rows = [
        GridResult(
            GridPoint({RATE: str(i)}, 0),
            figures(one, parse_slo("ttft_p99<1")),
            Engine.of("e", [one]),
        )
        for i, one in enumerate(runs, start=1)
    ]
    drawing = page_of(grid_rows).drawings[0]
    assert "An arrow at the top" in drawing.caption
    assert len(drawing.figure.axes[0].lines[0].get_xdata()) == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["--set", "scheduler.agin_s=1,2"],
            "scheduler.agin_s: unknown option, did you mean aging_s?",
        ),
        (["--set", "max_num_seq=1,2"], "max_num_seq: unknown key, did you mean max_num_seqs?"),
        (["--set", "max_num_seqs=1,zwei"], "max_num_seqs"),
        (["--rates", "0,1"], "--rates: expected numbers above 0, got '0'"),
        (["--rates", "1,fast"], "got 'fast'"),
        (["--rates", "1,2,1"], "--rates: 1 is given twice"),
        (["--rates", "1", "--step-time", "h9000"], "step times 'h9000': neither a .json file"),
        (
            [
                "--set",
                "executor.step_time={kind: linear, base_s: 1},{kind: linear, base_s: 1, bas_s: 1}",
            ],
            "bas_s: unknown key; there are kind, base_s",
        ),
        (["--rates", "1", "--scale-rate", "0"], "must be a finite number > 0"),
        ([], "nothing to sweep"),
        (["--rates", "1", "--seeds", "0"], "--seeds: expected 1 or more"),
        (["--rates", "1", "--jobs", "0"], "--jobs: expected 1 or more"),
    ],
)
def test_a_wrong_grid_is_refused_before_anything_runs(
    engine: Path, options: list[str], says: str
) -> None:
    assert says in lab("sweep", engine, "--trace", WORKLOAD, *options, fails=True)


def test_engines_are_told_apart_by_as_little_as_needed() -> None:
    assert display_names(["x/fcfs.yaml", "x/vtc.yaml"]) == ["fcfs", "vtc"]
    assert display_names(["x/e.yaml", "y/e.yaml"]) == ["x/e.yaml", "y/e.yaml"]
    assert display_names(["e.yaml", "e.yaml"]) == ["e (1)", "e (2)"]
