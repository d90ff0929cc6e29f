"""`--until`: seeds are added until an interval is narrow enough, or the time is up."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dovetail.errors import ConfigError
from dovetail_lab.records import RunResult
from dovetail_lab.until import Until
from tests.lab.commands import lab, write_engine
from tests.lab.made_runs import record, rejected, run

TRACE = "requests=12 arrivals=poisson(6) prompt=uniform(20,90) output=uniform(5,20)"


def runs(factors: list[float]) -> list[RunResult]:
    return [
        run([record(index, factor, arrival_s=index) for index in range(3)], seed=seed)
        for seed, factor in enumerate(factors)
    ]


def test_an_interval_is_narrow_or_says_how_many_more_seeds_it_needs() -> None:
    base = runs([1.0] * 6)
    [still] = Until.parse("5%", 0.95).look({"A": base, "B": runs([1.1] * 6)})
    assert (still.narrow, still.more) == (True, 0)
    assert "+10.0 % [+10.0, +10.0] over 6 seeds" in still.says
    [noisy] = Until.parse("ttft_p99=5%", 0.95).look({"A": base, "B": runs([1.0, 1.5] * 3)})
    assert not noisy.narrow
    assert noisy.more > 50


def test_a_figure_that_a_run_lacks_ends_the_search() -> None:
    none = [run(map(rejected, range(3))), *runs([1.0] * 6)[1:]]
    [look] = Until.parse("5%", 0.95).look({"A": runs([1.0] * 6), "B": none})
    assert look.more != look.more
    assert "no number of seeds gives an interval" in look.says


@pytest.mark.parametrize(
    "text", ["5", "0%", "-5%", "101%", "ttfb=5%", "=5%", "1e2%", "9" * 400 + "%", "٥%"]
)
def test_a_senseless_goal_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--until"):
        Until.parse(text, 0.95)


@pytest.mark.slow("simulates a trace with several seeds")
def test_seeds_are_added_up_to_the_width_or_the_budget(tmp_path: Path) -> None:
    engines = [write_engine(tmp_path / f"{name}.yaml", name) for name in ("fcfs", "sjf")]
    command = ("compare", *engines, "--jobs", 1, "--resamples", 100)
    said = lab(*command, "--trace", TRACE, "--until", "itl_mean=30%")
    seeds = re.search(r"over (\d+) seeds.*: narrow enough", said)
    assert seeds is not None
    assert int(seeds[1]) >= 5
    hurried = lab(*command, "--trace", TRACE, "--until", "e2e_mean=0.01%", "--budget", 1e-9)
    assert "over 1 seeds" in hurried
    assert "too wide, 4 more seeds needed" in hurried


def test_a_recorded_trace_has_no_more_traffic_to_give(tmp_path: Path) -> None:
    engines = [write_engine(tmp_path / f"{name}.yaml", name) for name in ("fcfs", "sjf")]
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,10,5\n")
    said = lab("compare", *engines, "--trace", trace, "--until", "5%", fails=True)
    assert "every seed replays the same requests of this trace" in said.replace("\n", " ")
