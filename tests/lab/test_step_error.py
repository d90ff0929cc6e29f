"""A comparison repeated at other step times: which findings survive, and when a load is near
saturation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dovetail_lab.compare import compare
from dovetail_lab.step_error import Repeated, StepErrors
from dovetail_lab.verdict import Comparison
from tests.lab import runs
from tests.lab.commands import lab, write_engine
from tests.lab.made_runs import run_of_ttfts

ERRORS = StepErrors({"A": 0.04, "B": 0.04}, "a test")


def compared(base: float, other: float) -> Comparison:
    """A's TTFTs times `base` against B's times `other`."""
    ttfts = np.random.default_rng(0).lognormal(0, 0.4, 120)
    return compare(
        {"A": [run_of_ttfts(base * ttfts)], "B": [run_of_ttfts(other * ttfts)]}, resamples=100
    )


def test_a_finding_survives_if_it_is_the_same_with_shorter_and_longer_steps() -> None:
    repeated = Repeated(ERRORS, compared(1, 0.7), compared(0.9, 0.6), compared(1.1, 0.8))
    assert repeated.verdict(0).startswith("B against A: survives: cuts mean TTFT, cuts p99 TTFT")
    assert "doesn't survive" not in repeated.verdict(0)


def test_a_finding_that_vanishes_or_turns_around_is_reported_with_the_steps_that_undo_it() -> None:
    repeated = Repeated(ERRORS, compared(1, 0.7), compared(1, 1), compared(1, 1.3))
    assert (
        "doesn't survive: cuts mean TTFT (no measurable difference with shorter steps, worse with "
        "longer steps)" in repeated.verdict(0)
    )
    line = repeated.nominal.versus[0].line("ttft", "p99")
    assert (repeated.survives(0, line), repeated.cells(0, line)) == (False, ["0.0 %", "+30.0 %"])


def test_what_is_measurable_at_other_step_times_only_is_reported() -> None:
    repeated = Repeated(ERRORS, compared(1, 1), compared(1, 1), compared(1, 1.3))
    assert "measurable only then: raises mean TTFT with longer steps" in repeated.verdict(0)
    assert (
        Repeated(ERRORS, *[compared(1, 1)] * 3).verdict(0)
        == "B against A: no measurable difference then either"
    )


def test_a_latency_that_changes_far_more_than_the_steps_warns_of_saturation() -> None:
    calm = Repeated(ERRORS, compared(1, 0.7), compared(0.95, 0.67), compared(1.05, 0.73))
    assert list(calm.warnings) == []
    [warning] = Repeated(
        ERRORS, compared(1, 0.7), compared(0.95, 0.4), compared(1.05, 1.26)
    ).warnings
    assert warning.startswith(
        "B is near saturation: with every step 4.0 % shorter or longer its mean TTFT changes by "
        "-42.9 % or +80.0 %"
    )


def test_the_factor_multiplies_the_time_of_every_step() -> None:
    requests = [runs.request(0, output=4)]
    plain, slow = (
        runs.run(requests, executor={"step_time_factor": factor}).requests[0].token_times_s
        for factor in (1.0, 1.5)
    )
    assert np.allclose(slow, 1.5 * plain)


@pytest.mark.usefixtures("no_figures")
@pytest.mark.slow("simulates many requests")
def test_compare_repeats_at_the_error_of_the_step_times(tmp_path: Path) -> None:
    engines = [write_engine(tmp_path / f"{name}.yaml", name) for name in ("fcfs", "sjf")]
    common = (
        "compare",
        *engines,
        "--trace",
        "arrivals=poisson(20) requests=10 prompt=100 output=uniform(1,60)",
        "--resamples",
        100,
        "--jobs",
        1,
    )
    said = lab(*common)
    assert "--step-time-error 0.04 repeats with steps 4 % longer and shorter" in said
    said = lab(*common, "--step-time", "rtxpro6000-llama-3.1-8b", "--out", tmp_path / "out")
    assert (
        "Repeated with every step 2.1 % longer, and shorter by the same factor (the error of "
        "rtxpro6000-llama-3.1-8b):" in said
    )
    found = json.loads((tmp_path / "out/comparison.json").read_text())
    assert found["step_time_error"]["errors"] == {"fcfs": 0.0209, "sjf": 0.0209}
    assert all(
        {"survives", "shorter_steps", "longer_steps"} <= set(change)
        for change in found["versus"][0]["changes"]
    )
    assert "Repeated with every step" in (tmp_path / "out/report.html").read_text()
    said = lab(*common, "--step-time-error", "1.5", fails=True)
    assert (
        "--step-time-error: expected a share of at least 0 and less than 1, such as 0.04, got 1.5"
        in said
    )
