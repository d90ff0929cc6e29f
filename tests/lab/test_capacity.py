"""The search for the highest rate: it finds it, to its tolerance, and notices where its assumption fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.errors import ConfigError
from dovetail_lab.capacity import MAX_DOUBLINGS, find_capacity
from dovetail_lab.records import RunResult
from dovetail_lab.slo import parse_slo
from tests.lab.commands import lab, write_engine
from tests.lab.made_runs import run_of_ttfts
from tests.support import examples

SLO = parse_slo("ttft_p99<1")


def breaks_above(*limits: float) -> Callable[[float], list[RunResult]]:
    """Objectives hold below the first limit, fail up to the second, hold up to the third, ..."""
    return lambda scale: [run_of_ttfts([2.0 if sum(scale > limit for limit in limits) % 2 else 0.5])]


@examples(quick=60, full=500)
@given(limit=st.floats(0.01, 100), start=st.floats(0.1, 10), tolerance=st.sampled_from([0.005, 0.02, 0.2]))
def test_the_limit_is_found_to_the_tolerance(limit: float, start: float, tolerance: float) -> None:
    found = find_capacity(breaks_above(limit), SLO, tolerance=tolerance, start=start)
    assert found.scale is not None
    assert found.scale <= limit <= found.scale * (1 + tolerance)
    assert found.monotone
    assert not found.open_ended
    assert [trial.scale for trial in found.trials] == sorted({trial.scale for trial in found.trials})


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


@pytest.mark.parametrize(("tolerance", "start"), [(0.0, 1.0), (2.0, 1.0), (0.02, 0.0), (0.02, float("nan"))])
def test_a_senseless_search_is_refused(tolerance: float, start: float) -> None:
    with pytest.raises(ConfigError):
        find_capacity(breaks_above(1.0), SLO, tolerance=tolerance, start=start)


WORKLOAD = "requests=40 arrivals=poisson(2) prompt=fixed(100) output=fixed(20)"


def test_the_command_prints_the_rate_and_every_trial(tmp_path: Path) -> None:
    engine = write_engine(tmp_path / "fcfs.yaml")
    said = lab("capacity", engine, "--trace", WORKLOAD, "--slo", "ttft_p99<1", "--tolerance", "0.1", "--out", tmp_path / "out")
    assert "requests/s" in said
    assert "meet ttft_p99<1; tolerance 10 %" in said
    table = (tmp_path / "out" / "capacity.csv").read_text().splitlines()
    assert table[0] == "policy,scale_rate,requests_per_s,ttft_p99_s,met,capacity"
    assert sum(line.endswith(",yes,yes") for line in table) == 1


def test_one_request_has_no_rate_to_scale(tmp_path: Path) -> None:
    said = lab("capacity", write_engine(tmp_path / "a.yaml"), "--trace", WORKLOAD, "--slice", "0:1", "--slo", "ttft_p99<1", fails=True)
    assert "there is no rate to scale" in said
