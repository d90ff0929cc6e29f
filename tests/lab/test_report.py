"""The report: complete, self-contained, the same bytes each time; and it survives runs in which
nothing happened."""

from __future__ import annotations

import csv
import json
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.errors import ConfigError, MissingExtraError
from dovetail_lab.compare import compare
from dovetail_lab.compare_command import file_name
from dovetail_lab.digits import evenly
from dovetail_lab.experiment_options import need
from dovetail_lab.records import RunResult
from dovetail_lab.report.figures import held_means
from dovetail_lab.report.html import differences
from dovetail_lab.report.page import Report, write_report
from dovetail_lab.report.style import DASHES, SERIES, STYLES, dot_of, line_of
from dovetail_lab.report_command import by_policy
from tests.lab.commands import lab, write_engine
from tests.lab.made_runs import record, rejected, run, run_of_ttfts
from tests.support import examples

RENDERS = pytest.mark.slow("renders many figures")
VOID = {"meta", "br", "wbr", "hr", "img", "link", "input"}


class Tags(HTMLParser):
    """Checks that tags nest, and gathers attributes that could fetch something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.links += [
            value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "srcset")
        ]
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def ttfts(count: int = 60) -> np.ndarray:
    return np.random.default_rng(0).lognormal(0, 0.5, count)


def two_policies() -> Report:
    runs = {
        "A<1>": [run_of_ttfts(ttfts())],
        "B & co": [run_of_ttfts(ttfts() * 0.7, notes=("a note",))],
    }
    return Report(
        "A and B on made", "dovetail lab compare a.yaml b.yaml", runs, compare(runs, resamples=100)
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report")
    write_report(two_policies(), out)
    return out


def assert_complete(page: str) -> None:
    """Tags nest, ids are unique, and nothing is fetched."""
    tags = Tags()
    tags.feed(page)
    assert not tags.open
    assert all(link.startswith("#") for link in tags.links)
    assert not re.search(r"url\((?!#)|@import|<script|<link", page)
    assert len(tags.ids) == len(set(tags.ids))


def test_the_page_needs_nothing_else(written: Path) -> None:
    assert_complete((written / "report.html").read_text())


def test_the_page_tells_verdict_conditions_error_notes_settings_and_command(written: Path) -> None:
    page = (written / "report.html").read_text().replace("\N{NO-BREAK SPACE}", " ")
    for text in (
        "B &amp; co cuts mean TTFT by 30 % [30, 30], cuts p99 TTFT by 30 % [30, 30]",
        "A&lt;1&gt;",
        "overlap on, prefill limit 2, prefix reuse on, 100 pages, blocks of 16 tokens",
        "off by 3.0% on average (12 steps)",
        "a note",
        "dovetail lab compare a.yaml b.yaml",
        "&#34;max_model_len&#34;: 512",
        "paired bootstrap",
    ):
        assert text in page


def test_every_figure_is_in_the_page_in_its_colours_and_beside_it(written: Path) -> None:
    drawings = re.findall(r"<svg.*?</svg>", (written / "report.html").read_text(), re.DOTALL)
    assert len(drawings) == 6
    for drawing in drawings:
        ET.fromstring(drawing)
        assert "var(--ink)" in drawing
        assert not re.search("#[0-9a-f]{6}", drawing.replace("#ffffff", ""))
    for name in ("changes", "latencies", "over-time", "clients", "service", "work"):
        assert (written / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_lines_of_policies_differ_and_coinciding_ones_show_through() -> None:
    styles = [
        (line_of(index)["color"], str(line_of(index)["linestyle"])) for index in range(STYLES)
    ]
    assert len(set(styles)) == STYLES
    first, *others = (line_of(index) for index in range(len(DASHES)))
    assert all(
        one["linestyle"] != "-"
        and one["linewidth"] < first["linewidth"]
        and one["zorder"] > first["zorder"]
        for one in others
    )
    assert len({str(one["linestyle"]) for one in (first, *others)}) == len(DASHES)
    assert len({dot_of(index)["marker"] for index in range(len(SERIES))}) == len(SERIES)


@pytest.mark.usefixtures("no_figures")
def test_counts_on_the_page_are_those_of_all_seeds(tmp_path: Path) -> None:
    runs = {
        name: [
            run([*(record(i, 0.5) for i in range(40)), rejected(40)], seed=seed) for seed in (3, 4)
        ]
        for name in "AB"
    }
    write_report(Report("two seeds", "", runs, compare(runs, resamples=100)), tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "82 requests, 41 a seed, 2 seeds (3, 4)." in page
    counts = [
        f'<td data-label="{what}">{count}</td>'
        for what, count in (("completed", 80), ("rejected", 2), ("failed", 0))
    ]
    assert page.count("".join(counts)) == 2
    assert "of 80 requests that both completed" in page


@pytest.mark.usefixtures("no_figures")
def test_requests_are_reported_for_each_policy_where_they_differ(tmp_path: Path) -> None:
    write_report(
        Report(
            "apart",
            "",
            {"A": [run([record(0, 0.5)])], "B": [run([record(i, 0.5) for i in range(2)], seed=7)]},
        ),
        tmp_path,
    )
    assert "A: 1 request, seed 0; B: 2 requests, seed 7." in (tmp_path / "report.html").read_text()


def test_settings_that_differ_stand_apart() -> None:
    one = {"scheduler": {"name": "fcfs", "max_stretch": 2.0}, "observers": [], "overlap": True}
    other = {"scheduler": {"name": "vtc"}, "observers": [{"name": "log"}], "overlap": True}
    assert differences({"a": one, "b": other}) == [
        ("scheduler.name", ["fcfs", "vtc"]),
        ("scheduler.max_stretch", ["2.0", "–"]),
        ("observers.0.name", ["–", "log"]),
    ]
    assert differences({"a": one, "b": one}) == differences({"a": one}) == []


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0.0451, 0.046, 0.33], ["0.0451", "0.0460", "0.3300"]),
        ([12.0, 0.0012, math.nan], ["12.000", "0.001", "–"]),
        ([0.0, 372.4], ["0", "372"]),
        ([12_345.6, 2.0], ["12,346", "2"]),
        ([math.inf, 1.5], ["∞", "1.50"]),
        ([math.nan], ["–"]),
        ([], []),
    ],
)
def test_numbers_of_one_kind_have_as_many_decimals(values: list[float], texts: list[str]) -> None:
    assert evenly(values) == texts


def test_tables_hold_every_request_and_change(written: Path) -> None:
    requests = list(csv.DictReader((written / "requests.csv").open()))
    assert len(requests) == 120
    assert float(requests[0]["ttft_s"]) == pytest.approx(ttfts()[0])
    changes = list(csv.DictReader((written / "comparison.csv").open()))
    assert {(row["metric"], row["statistic"]) for row in changes} >= {
        ("ttft", "p99"),
        ("itl", "p99"),
        ("output_rate", ""),
    }
    assert {(row["measurable"], row["outcome"]) for row in changes} == {
        ("yes", "better"),
        ("no", "no measurable difference"),
        ("no", "no interval"),
    }
    assert float(
        next(row for row in changes if row["statistic"] == "p99")["change"]
    ) == pytest.approx(-0.3)
    clients = list(csv.DictReader((written / "clients.csv").open()))
    assert sum(int(row["requests"]) for row in clients) == 120
    own = [row for row in requests if (row["policy"], row["client"]) == ("A<1>", "a")]
    assert float(clients[0]["service"]) == sum(
        int(row["prompt_tokens"]) + 2 * int(row["output_tokens"]) for row in own
    )
    assert float(clients[0]["ttft_mean_s"]) == pytest.approx(
        np.mean([float(row["ttft_s"]) for row in own])
    )
    assert (written / "summary.csv").stat().st_size
    assert (written / "timeline.csv").stat().st_size


@pytest.mark.slow("renders all figures again")
def test_the_same_runs_give_the_same_bytes(written: Path, tmp_path: Path) -> None:
    for path in write_report(two_policies(), tmp_path):
        assert path.read_bytes() == (written / path.name).read_bytes(), path.name


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (run([]), "No step ran."),
        (run([rejected(0), rejected(1)]), "No request completed: there are no latencies."),
        pytest.param(run([record(0, 0.5)]), "The trace has one client", marks=RENDERS),
        pytest.param(run([record(0, 0.5, gaps_s=())]), "The trace has one client", marks=RENDERS),
    ],
    ids=["no request", "none completed", "one request", "one token"],
)
def test_a_run_in_which_little_happened_has_a_report_too(
    made: RunResult, says: str, tmp_path: Path
) -> None:
    write_report(Report("little", "", {"A": [made]}), tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert says in page
    assert "nan" not in re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL)


def test_a_note_says_whose_it_is_unless_all_have_it(written: Path) -> None:
    page = (written / "report.html").read_text()
    assert "B &amp; co: a note" in page


def test_a_missing_package_is_named_with_the_line_that_installs_it() -> None:
    with pytest.raises(
        MissingExtraError,
        match=r'needs no_such_package; install with: pip install "dovetail-llm\[lab\]"',
    ):
        need("json", "no_such_package")


def test_a_report_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one run"):
        write_report(Report("none", "", {}), tmp_path)


@examples(quick=50, full=500)
@given(data=st.data(), bins=st.integers(1, 20))
def test_means_over_time_keep_the_area(data: st.DataObject, bins: int) -> None:
    times = np.cumsum(data.draw(st.lists(st.floats(0.01, 5), min_size=1, max_size=20)))
    values = np.array(
        data.draw(st.lists(st.floats(0, 100), min_size=len(times), max_size=len(times)))
    )
    end = float(times[-1])
    middles, means = held_means(times, values, end, bins)
    assert np.isclose(means.sum() * end / bins, np.sum(np.diff(times) * values[:-1]), atol=1e-6)
    assert (np.diff(middles) > 0).all()


WORKLOAD = "requests=30 arrivals=poisson(8) prompt=uniform(20, 200) output=fixed(10) clients=2"


@pytest.mark.slow("draws a report twice")
@pytest.mark.usefixtures("no_figures")
def test_compare_writes_all_of_it_and_report_makes_it_again(tmp_path: Path) -> None:
    engines = [write_engine(tmp_path / f"{name}.yaml", name) for name in ("fcfs", "vtc")]
    first, again = tmp_path / "first", tmp_path / "again"
    said = lab(
        "compare",
        *engines,
        "--trace",
        WORKLOAD,
        "--out",
        first,
        "--keep-runs",
        "--decisions",
        "--jobs",
        "1",
        "--resamples",
        "200",
    )
    assert "vtc" in said
    assert "paired bootstrap" in said
    assert json.loads((first / "comparison.json").read_text())["policies"] == ["fcfs", "vtc"]
    assert {path.name for path in first.glob("*.json")} == {
        "comparison.json",
        *(f"{name}-0{kind}.json" for name in ("fcfs", "vtc") for kind in ("", "-decisions")),
    }
    page = (first / "report.html").read_text()
    assert "dovetail lab compare" in page
    assert "decision_log" not in page  # no setting of the engines
    lab("report", first / "fcfs-0.json", first / "vtc-0.json", "--out", again)
    assert (
        {path.name for path in first.glob("*.png")}
        == {path.name for path in again.glob("*.png")}
        >= {"changes.png", "latencies.png"}
    )
    for name in ("requests.csv", "summary.csv", "timeline.csv"):
        assert (first / name).read_bytes() == (again / name).read_bytes()


def test_files_of_engines_named_by_their_paths_stay_in_the_folder() -> None:
    assert file_name("/etc/x/e.yaml", 3, "-decisions") == "etc_x_e.yaml-3-decisions.json"
    assert file_name("../e (2)", 0) == ".._e_2-0.json"


@pytest.mark.usefixtures("no_figures")
def test_runs_of_other_traces_are_reported_side_by_side_but_not_compared(tmp_path: Path) -> None:
    for name, count in (("a", 5), ("b", 6)):
        run_of_ttfts(ttfts(count), name=name).save(tmp_path / f"{name}.json")
    said = lab("report", tmp_path / "a.json", tmp_path / "b.json", "--out", tmp_path / "out")
    assert "not compared: a ran 5 requests of made, b ran 6" in said
    assert (tmp_path / "out" / "report.html").exists()


def test_runs_go_by_name_and_seed_or_else_by_file() -> None:
    a0, a1, b0 = (
        run_of_ttfts([1.0], name=name, seed=seed) for name, seed in (("a", 0), ("a", 1), ("b", 0))
    )
    assert {
        name: [r.seed for r in runs]
        for name, runs in by_policy([(Path("2"), a1), (Path("1"), a0), (Path("3"), b0)]).items()
    } == {
        "a": [0, 1],
        "b": [0],
    }
    assert list(by_policy([(Path("x/run.json"), a0), (Path("y/run.json"), a0)])) == [
        "x/run.json",
        "y/run.json",
    ]
    with pytest.raises(ConfigError, match="given twice"):
        by_policy([(Path("x"), a0), (Path("x"), a0)])


@pytest.mark.parametrize(
    ("text", "says"),
    [(None, "can't be read"), ("{}", "not a run of the lab"), ("nonsense", "can't be read")],
)
def test_a_file_that_is_no_run_is_named(text: str | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text)
    said = lab("report", path, "--out", tmp_path / "out", fails=True)
    assert str(path) in said
    assert says in said
