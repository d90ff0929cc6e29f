"""Tuning a policy: what is searched, that a killed search goes on, and what is said of the gain."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import pytest
from annotated_types import Interval
from pydantic import BaseModel, Field, PositiveFloat

from dovetail import EngineConfig
from dovetail.errors import ConfigError
from dovetail_lab.option_space import Choice, Range, parse_ranges, space_of
from dovetail_lab.workloads import load_workload
from tests.lab.commands import lab, write_engine

pytest.importorskip("optuna")
TRACE = "requests=12 arrivals=poisson(9) prompt=uniform(20,90) output=uniform(5,40)"


class Options(BaseModel):
    share: float = Field(0.5, ge=0, le=1)
    above: Annotated[float, Interval(gt=0, le=100)] = 1.0
    level: int | None = Field(None, gt=0, lt=9)
    late: Literal["reject", "last"] = "last"
    eager: bool = False
    limit: PositiveFloat | None = 2.0
    name: str = ""


def test_ranges_are_those_of_the_constraints_and_the_rest_is_named() -> None:
    space, unbounded = space_of(Options, {})
    assert space == [
        Range("share", 0.0, 1.0, whole=False),
        Range("above", 0.01, 100.0, whole=False),
        Range("level", 1.0, 8.0, whole=True),
        Choice("late", ("reject", "last")),
        Choice("eager", (False, True)),
    ]
    assert unbounded == ["limit", "name"]
    given, _ = space_of(Options, parse_ranges(["limit=0.5..4", "level=2..3"]))
    assert Range("limit", 0.5, 4.0, whole=False) in given
    assert Range("level", 2.0, 3.0, whole=True) in given


@pytest.mark.parametrize(
    "text",
    [
        "level=0..3",
        "level=1.5..3",
        "late=1..2",
        "shares=0..1",
        "share=1..0",
        "share=0..nan",
        "share=..",
        "share",
        "=1..2",
        "share=0..inf",
        "limit=0..1",
    ],
)
def test_a_senseless_range_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--range"):
        space_of(Options, parse_ranges([text]))


SEARCH = """
import os, signal, sys
from pathlib import Path
from dovetail_lab import tuning
from tests.lab.test_tune import search
replay, left = tuning.replay, [4]
def dying(*of, **how):
    left[0] -= 1
    return replay(*of, **how) if left[0] else os.kill(os.getpid(), signal.SIGKILL)
tuning.replay = dying
search(Path(sys.argv[1])).run(Path(sys.argv[1]), 5)
"""


def search(folder: Path):  # type: ignore[no-untyped-def]  # optuna's module isn't there without it
    from dovetail_lab.tuning import Goal, Search

    engine = EngineConfig.load(write_engine(folder / "engine.yaml", "mlfq"))
    space = [Range("quantum", 1, 64, whole=True), Range("levels", 1, 8, whole=True)]
    return Search(engine, "mlfq", {}, space, Goal("ttft_mean", None), load_workload(TRACE), 0)


@pytest.mark.slow("imports optuna in another process")
def test_a_killed_search_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    ended = subprocess.run([sys.executable, "-c", SEARCH, killed], check=False)
    assert ended.returncode == -signal.SIGKILL
    first = [trial for trial in search(whole).run(whole, 5).trials if trial.value is not None]
    study = search(killed).run(killed, 5)
    again = [trial for trial in study.trials if trial.value is not None]
    assert len(study.trials) == 6, "two had ended, one was killed, and three were missing"
    assert [(one.params, one.value) for one in again] == [(one.params, one.value) for one in first]


@pytest.mark.slow("simulates many requests")
def test_the_gain_is_judged_on_requests_that_the_search_has_not_seen(tmp_path: Path) -> None:
    """Chunks of one token make prompts take ages; any others are a gain, whatever the error."""
    engine = write_engine(tmp_path / "engine.yaml")
    common = ("tune", "sarathi", "--engine", engine, "--set", "scheduler.name=sarathi")
    common = (*common, "--trace", TRACE, "--objective", "ttft_mean", "--trials", 3)
    common = (*common, "--out", tmp_path / "out", "--range", "chunk_tokens=128..256")
    said = lab(*common, "--set", "scheduler.chunk_tokens=9", "--step-time-error", 0.04)
    assert "8 requests each" in said
    assert "held out, steps 4.0 % shorter" in said
    assert said.strip().endswith("the gain survives")
    said = lab(*common, "--set", "scheduler.chunk_tokens=256")
    assert "the gain does not survive; the step times state no error" in said


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--objective", "speed"), "--objective: there is no 'speed'"),
        (("--objective", "goodput"), "--objective goodput needs --goodput"),
        (("--objective", "ttft_mean", "--trials", "0"), "--trials: expected 1 to 10,000, got 0"),
        (("--objective", "ttft_mean", "--held-out", "1"), "--held-out: expected a share between"),
        (("--objective", "ttft_mean", "--held-out", "0.001"), "too few to hold some out"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, options: tuple[str, ...], says: str) -> None:
    engine = write_engine(tmp_path / "engine.yaml")
    command = ("tune", "mlfq", "--engine", engine, "--trace", TRACE, "--out", tmp_path / "out")
    assert says in lab(*command, *options, fails=True).replace("\n", " ")
