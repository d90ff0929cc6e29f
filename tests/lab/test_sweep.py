"""Sweeps: the grid is right, the rows are the runs', and processes change nothing."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

from dovetail.errors import ConfigError
from dovetail_lab.jobs import names_of
from dovetail_lab.slo import parse_slo
from dovetail_lab.sweep import Point, Row, as_csv, averaged, figures, grid, parse_axis
from tests.lab.commands import lab, write_engine
from tests.lab.made_runs import rejected, run, run_of_ttfts

WORKLOAD = "requests=12 arrivals=poisson(8) prompt=uniform(20, 200) output=fixed(10)"


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    return write_engine(tmp_path / "priority.yaml", "priority")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("max_num_seqs=1,2", ("1", "2")),
        ("kv_cache={name: prefix, reuse: true},{name: prefix, reuse: false}", ("{name: prefix, reuse: true}", "{name: prefix, reuse: false}")),
        ('scheduler="a,b",c', ('"a,b"', "c")),
    ],
)
def test_values_are_parted_at_commas_outside_brackets_and_quotes(text: str, values: tuple[str, ...]) -> None:
    assert parse_axis(text).values == values


@pytest.mark.parametrize("text", ["max_num_seqs", "=1,2", "max_num_seqs=", "max_num_seqs=1,,2", "max_num_seqs=1,1"])
def test_a_malformed_axis_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        parse_axis(text)


def test_the_grid_has_every_combination_once() -> None:
    points = list(grid([parse_axis("a=1,2"), parse_axis("b=x,y,z")], range(2)))
    assert len({(*point.values.values(), point.seed) for point in points}) == len(points) == 12
    assert points[0] == Point({"a": "1", "b": "x"}, 0)
    with pytest.raises(ConfigError, match="a is given twice"):
        list(grid([parse_axis("a=1"), parse_axis("a=2")], range(1)))


def test_a_row_without_completed_requests_is_empty_and_misses() -> None:
    found = figures(run([rejected(0)]), parse_slo("ttft_p99<1"))
    assert math.isnan(found["ttft_p99"])
    assert (found["completed"], found["rejected"], found["slo_met"]) == (0, 1, 0)
    assert ",,," in as_csv([Row(Point({"a": "1"}, 0), found)])


def test_averages_are_over_seeds_only() -> None:
    rows = [Row(Point({"a": value}, seed), figures(run_of_ttfts([ttft]))) for value, seed, ttft in (("1", 0, 1.0), ("1", 1, 3.0), ("2", 0, 5.0))]
    assert [row.figures["ttft_mean"] for row in averaged(rows)] == pytest.approx([2.0, 5.0])


def test_processes_change_no_byte(engine: Path, tmp_path: Path) -> None:
    texts = []
    for jobs in ("1", "2"):
        out = tmp_path / jobs
        lab("sweep", engine, "--trace", WORKLOAD, "--set", "scheduler.aging_s=1,5", "--rates", "1,2", "--out", out, "--jobs", jobs)
        texts.append((out / "sweep.csv").read_bytes())
    assert texts[0] == texts[1]
    rows = list(csv.DictReader(texts[0].decode().splitlines()))
    assert [(row["scheduler.aging_s"], row["scale_rate"], row["completed"]) for row in rows] == [
        ("1", "1", "12"),
        ("1", "2", "12"),
        ("5", "1", "12"),
        ("5", "2", "12"),
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--set", "scheduler.agin_s=1,2"], "scheduler.agin_s: unknown option, did you mean aging_s?"),
        (["--set", "max_num_seq=1,2"], "max_num_seq: unknown key, did you mean max_num_seqs?"),
        (["--set", "max_num_seqs=1,zwei"], "max_num_seqs"),
        (["--rates", "0,1"], "--rates: expected numbers above 0, got '0'"),
        (["--rates", "1,fast"], "got 'fast'"),
        (["--rates", "1,2,1"], "--rates: 1 is given twice"),
        (["--rates", "1", "--step-time", "h9000"], "step times 'h9000': neither a .json file"),
        (["--set", "executor.step_time={kind: linear, base_s: 1},{kind: linear, base_s: 1, bas_s: 1}"], "bas_s: unknown key; there are kind, base_s"),
        (["--rates", "1", "--scale-rate", "0"], "must be a finite number > 0"),
        ([], "nothing to sweep over"),
        (["--rates", "1", "--seeds", "0"], "--seeds: expected 1 or more"),
        (["--rates", "1", "--jobs", "0"], "--jobs: expected 1 or more"),
    ],
)
def test_a_wrong_grid_is_refused_before_anything_runs(engine: Path, options: list[str], says: str) -> None:
    assert says in lab("sweep", engine, "--trace", WORKLOAD, *options, fails=True)


def test_engines_are_told_apart_by_as_little_as_needed() -> None:
    assert names_of(["x/fcfs.yaml", "x/vtc.yaml"]) == ["fcfs", "vtc"]
    assert names_of(["x/e.yaml", "y/e.yaml"]) == ["x/e.yaml", "y/e.yaml"]
    assert names_of(["e.yaml", "e.yaml"]) == ["e (1)", "e (2)"]
