"""Calibration: an executor whose step times are known must be found out; a real one must give a
profile that a simulation can use."""

from __future__ import annotations

import json
from dataclasses import astuple
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.lab.own_gpu import Archive, fit_anew
from bench.lab.policies import component, registry_with
from hypothesis import given
from hypothesis import strategies as st

from dovetail.errors import ConfigError
from dovetail_lab.calibrate import Calibration, calibrate
from dovetail_lab.fitting import Measurement, nonnegative_least_squares
from dovetail_lab.metrics import per_request
from dovetail_lab.profile_fitting import profile_of
from dovetail_lab.regime_fitting import fit_regimes
from dovetail_lab.rig import Sighting
from dovetail_lab.simulate import replay
from dovetail_lab.step_profile import LEVELS, StepTimeProfile
from dovetail_lab.step_time import PiecewiseStepTime, Regime, RegimeStepTime, StepShape
from dovetail_lab.workloads import load_workload
from tests.lab.commands import lab
from tests.lab.machine import GRAPH_SHARE, GRAPHS, RESULTS_S, ROW_GRAPHS, Jitter, machine
from tests.support import examples

DECODE = PiecewiseStepTime(points=((1, 0.004), (16, 0.005), (64, 0.009)), per_context_s=4e-8)
MIXED = PiecewiseStepTime(
    points=((1, 0.004), (1024, 0.03)),
    per_context_s=4e-8,
    per_pair_s=2e-10,
    per_row_s=2e-5,
    least_s=0.012,
)
LARGE = PiecewiseStepTime(
    points=((1, 0.02), (4096, 0.12)), per_context_s=4e-8, per_pair_s=2e-10, per_row_s=2e-5
)
FIGURES = tuple(f"{metric} p{at}" for metric in ("ttft", "tpot", "e2e") for at in (50, 99))
TRUE = RegimeStepTime(decode=DECODE, mixed=MIXED, large=LARGE, large_above=1024)


def pretended(overlap: bool = True, **times: float) -> dict[str, Any]:
    """An engine whose step times are known."""
    step_time = {"name": "true", "step_time": TRUE.model_dump(mode="json"), **times}
    sizes = {"max_num_seqs": 48, "max_num_batched_tokens": 3000, "max_model_len": 8192}
    return {
        "scheduler": "fcfs",
        "overlap": overlap,
        "executor": {"name": "simulated", "num_pages": 8000, "step_time": step_time},
        **sizes,
    }


@pytest.fixture(scope="module")
def found() -> Calibration:
    return calibrate(pretended(results_s=0.001, results_per_row_s=1e-5))


def shape(*rows: tuple[int, int]) -> StepShape:
    new, had = np.array(rows, np.int64).T
    return StepShape.of(new, had)


def decodes(rows: int, context: int) -> list[tuple[int, int]]:
    return [(1, context)] * rows


SHAPES = {
    "few decodes": decodes(3, 300),
    "many decodes": decodes(40, 1500),
    "a short prompt joins": [(40, 0), *decodes(6, 700)],
    "a chunk joins": [(600, 900), *decodes(20, 700)],
    "a large step": [(2500, 200), *decodes(20, 400)],
}


@pytest.mark.slow("calibrates an engine over the whole grid")
@pytest.mark.parametrize("rows", SHAPES.values(), ids=SHAPES.keys())
def test_known_step_times_are_found_out(found: Calibration, rows: list[tuple[int, int]]) -> None:
    assert found.profile.make().seconds(shape(*rows)) == pytest.approx(
        TRUE.seconds(shape(*rows)), rel=0.02
    )


@pytest.mark.slow("calibrates an engine with drafts")
def test_costs_of_lines_are_carried_and_no_draft_disturbs_the_grid() -> None:
    plain = calibrate(pretended(), quick=True).profile
    drafting = calibrate(
        {**pretended(), "speculation": {"drafter": "simulated", "max_drafts": 4}}, quick=True
    ).profile
    costs = dict(drafting.line_costs)
    assert not plain.line_costs
    assert (costs[1], costs[16]) == pytest.approx((0.004, 0.005), rel=1e-3)
    assert drafting.model_copy(update={"line_costs": ()}) == plain
    assert StepTimeProfile.load(drafting.model_dump(mode="json")) == drafting


@pytest.mark.slow("calibrates an engine over the whole grid")
def test_the_stated_error_is_that_of_steps_which_were_held_out(found: Calibration) -> None:
    assert found.complete
    assert found.profile.error is not None
    assert found.profile.error < 0.01
    assert "measurements that were excluded from the fit" in found.profile.judged_on


@pytest.mark.slow("calibrates an engine over the whole grid")
def test_the_time_until_tokens_are_delivered_is_found_out(found: Calibration) -> None:
    assert found.profile.results_s == pytest.approx(0.001, rel=0.01)
    assert found.profile.results_per_row_s == pytest.approx(1e-5, rel=0.01)


@pytest.mark.slow("calibrates an engine over the whole grid")
def test_more_work_never_takes_less(found: Calibration) -> None:
    model = found.profile.make()
    for steps in (
        [decodes(rows, 500) for rows in range(1, 48)],
        [decodes(16, context) for context in range(0, 4000, 100)],
        [[(tokens, 0), *decodes(16, 500)] for tokens in range(2, 900, 20)],
        [[(100, history), *decodes(16, 500)] for history in range(0, 4000, 100)],
    ):
        seconds = [model.seconds(shape(*rows)) for rows in steps]
        assert all(later >= earlier for earlier, later in pairwise(seconds))


@pytest.mark.slow("simulates many requests")
def test_a_simulation_with_the_profile_is_like_the_engine_that_was_measured(
    found: Calibration, tmp_path: Path
) -> None:
    found.profile.save(tmp_path / "found.json")
    trace = load_workload(
        "arrivals=poisson(6) requests=60 prompt=lognormal(300, 1, most=4000) output=uniform(10, 80)"
    )
    real = pretended(results_s=0.001, results_per_row_s=1e-5)
    simulated = {
        **real,
        "executor": {
            "name": "simulated",
            "num_pages": 8000,
            "step_time": str(tmp_path / "found.json"),
        },
    }
    for metric in ("ttft", "tpot", "e2e"):
        ours, theirs = (
            np.percentile(per_request(replay(config, trace), metric), [50, 99])
            for config in (simulated, real)
        )
        assert ours == pytest.approx(theirs, rel=0.03), metric


def test_without_overlap_the_core_is_not_taken_for_the_device() -> None:
    profile = calibrate(pretended(overlap=False, core_s=0.002), quick=True).profile
    assert profile.make().seconds(shape(*decodes(2, 30))) == pytest.approx(
        TRUE.seconds(shape(*decodes(2, 30))), rel=0.01
    )


LAUNCH = {
    "kind": "regimes",
    "decode": {"kind": "piecewise", "points": [(1, 0.002), (64, 0.002)]},
    "mixed": {"kind": "piecewise", "points": [(1, 0.04), (4096, 0.04)]},
}


@pytest.fixture(scope="module")
def found_launching() -> Calibration:
    """A step with a prompt is launched for longer than most of them compute, and the decodes before
    it end unseen meanwhile."""
    return calibrate(pretended(launch=LAUNCH, after_launch_s=0.0005, results_s=0.0002))


@pytest.mark.full
@pytest.mark.parametrize("rows", SHAPES.values(), ids=SHAPES.keys())
def test_the_time_of_launching_is_not_taken_for_the_steps_before(
    found_launching: Calibration, rows: list[tuple[int, int]]
) -> None:
    model, launch = found_launching.profile.make(), found_launching.profile.make_launch()
    assert launch is not None
    step = shape(*rows)
    launched = 0.002 if step.prefill_rows == 0 else 0.04
    assert launch.seconds(step) == pytest.approx(launched, rel=0.02)
    if not step.prefill_rows:
        assert model.seconds(step) == pytest.approx(TRUE.seconds(step), rel=0.02)
    else:
        assert max(launched, model.seconds(step)) == pytest.approx(
            max(launched, TRUE.seconds(step)), rel=0.05
        )


@pytest.mark.full
def test_what_ends_with_its_launching_is_found_out(found_launching: Calibration) -> None:
    assert found_launching.profile.after_launch_s == pytest.approx(0.0005, rel=0.05)
    assert found_launching.profile.error is not None
    assert found_launching.profile.error < 0.02


@pytest.mark.full
def test_a_simulation_of_a_slow_launcher_is_like_it(
    found_launching: Calibration, tmp_path: Path
) -> None:
    found_launching.profile.save(tmp_path / "found.json")
    trace = load_workload(
        "arrivals=poisson(6) requests=60 prompt=lognormal(300, 1, most=4000) output=uniform(10, 80)"
    )
    real = pretended(launch=LAUNCH, after_launch_s=0.0005, results_s=0.0002)
    simulated = {
        **real,
        "executor": {
            "name": "simulated",
            "num_pages": 8000,
            "step_time": str(tmp_path / "found.json"),
        },
    }
    for metric in ("ttft", "tpot", "e2e"):
        ours, theirs = (
            np.percentile(per_request(replay(config, trace), metric), [50, 99])
            for config in (simulated, real)
        )
        assert ours == pytest.approx(theirs, rel=0.03), metric


MACHINE = {
    "scheduler": "fcfs",
    "executor": {
        "name": "simulated",
        "num_pages": 40_000,
        "step_time": {"kind": "linear", "base_s": 1.0},
    },  # the machine doesn't read it
    "max_num_seqs": 128,
    "max_num_batched_tokens": 8192,
    "max_model_len": 16_384,
}
BUSY = (
    "arrivals=poisson(40) requests=500 prompt=lognormal(200, 1, most=6000) output=lognormal(60, "
    "0.7, most=300)"
)
BURSTS = (
    "arrivals=gamma(20, cv=2) requests=300 prompt=lognormal(900, 0.9, most=8000) "
    "output=lognormal(60, 0.7, most=300)"
)
STEADY = "arrivals=poisson(30) requests=400 prompt=uniform(20, 60) output=uniform(200, 300)"
SHORT = "arrivals=poisson(60) requests=1000 prompt=uniform(50, 700) output=uniform(6, 30)"


def calibrated(**attributes: Any) -> StepTimeProfile:
    """Return the result of measuring such a machine."""
    with machine(**attributes):
        return calibrate(MACHINE, time_limit_s=600).profile


def differences(
    profile: StepTimeProfile,
    workload: str,
    scheduler: str = "fcfs",
    seeds: int = 1,
    **attributes: Any,
) -> dict[str, float]:
    """Return the errors of a simulation with the machine's own profile by metric and percentile,
    relative to the machine's times."""
    trace, policy = load_workload(workload), {"scheduler": scheduler}
    simulated = {
        **MACHINE,
        "executor": {
            "name": "simulated",
            "num_pages": 40_000,
            "step_time": profile.model_dump(mode="json"),
        },
        **policy,
    }
    ours = [replay(simulated, trace, seed=seed) for seed in range(seeds)]
    with machine(**attributes):
        theirs = [replay({**MACHINE, **policy}, trace, seed=seed) for seed in range(seeds)]
    found = {}
    for metric in ("ttft", "tpot", "e2e"):
        own, measured = (
            np.percentile(np.concatenate([per_request(run, metric) for run in runs]), [50, 99])
            for runs in (ours, theirs)
        )
        found |= {
            f"{metric} p{at}": float(a / b - 1)
            for at, a, b in zip((50, 99), own, measured, strict=True)
        }
    return found


@pytest.fixture(scope="module")
def measured_machine() -> Calibration:
    with machine():
        return calibrate(MACHINE, time_limit_s=600)


@pytest.fixture(scope="module")
def found_machine(measured_machine: Calibration) -> StepTimeProfile:
    return measured_machine.profile


def gridded(made: Calibration) -> list[Sighting]:
    """What was sighted before the rehearsal."""
    return [sighting for sighting in made.sightings if not sighting.rehearsed]


@pytest.mark.full
def test_it_is_found_out_which_steps_are_one_graph_of_which_sizes(
    found_machine: StepTimeProfile,
) -> None:
    assert found_machine.recorded_tokens == GRAPHS[-1]
    assert tuple(found_machine.step_time["mixed"]["sizes"]) == GRAPHS
    assert found_machine.sampling_share == pytest.approx(1 - GRAPH_SHARE, abs=0.02)
    assert found_machine.error is not None
    assert found_machine.error < 0.01


@pytest.mark.full
@pytest.mark.parametrize(("workload", "scheduler"), [(BUSY, "fcfs"), (BURSTS, "sarathi")])
def test_a_machine_that_replays_small_steps_is_predicted(
    found_machine: StepTimeProfile, workload: str, scheduler: str
) -> None:
    assert differences(found_machine, workload, scheduler) == pytest.approx(
        dict.fromkeys(FIGURES, 0.0), abs=0.05
    )


@pytest.mark.full
def test_taken_for_launched_kernel_by_kernel_small_steps_are_not(
    found_machine: StepTimeProfile,
) -> None:
    wrong = found_machine.model_copy(update={"recorded_tokens": 0})
    assert max(map(abs, differences(wrong, SHORT).values())) > 0.05


STAIRS: dict[str, Any] = {
    "row_graphs": ROW_GRAPHS,
    "jump_s": 3e-4,
    "copying": 0.25,
    "decode_launch_s": 8e-4,
    "jitter": Jitter((0.9, 0.1), (1.0, 5.0)),
}


@pytest.fixture(scope="module")
def found_stairs() -> StepTimeProfile:
    """Decodes are padded, those above 16 rows take other kernels, some are launched late, and all
    begin before launching them has ended."""
    return calibrated(**STAIRS)


@pytest.mark.full
def test_it_is_found_out_what_decodes_are_padded_to(found_stairs: StepTimeProfile) -> None:
    assert tuple(found_stairs.step_time["decode"]["sizes"]) == ROW_GRAPHS
    model = found_stairs.make()
    for rows in range(1, 129):
        padded = next(size for size in ROW_GRAPHS if size >= rows)
        seconds = 1.3e-3 + 3e-6 * padded + (3e-4 if padded > 16 else 0) + 2.6e-8 * rows * 601
        assert model.seconds(shape(*decodes(rows, 600))) == pytest.approx(seconds, rel=0.01), rows


@pytest.mark.full
def test_decodes_that_no_size_is_padded_to_are_not_taken_for_padded(
    found_machine: StepTimeProfile,
) -> None:
    assert found_machine.step_time["decode"]["sizes"] == []


@pytest.mark.full
def test_it_is_found_out_that_decodes_begin_before_their_launching_has_ended(
    found_stairs: StepTimeProfile, found_machine: StepTimeProfile
) -> None:
    assert found_stairs.copying_share == pytest.approx(STAIRS["copying"], abs=0.03)
    assert found_machine.copying_share == 0.0


@pytest.mark.full
@pytest.mark.parametrize("workload", [SHORT, STEADY])
def test_a_machine_with_stairs_is_predicted(found_stairs: StepTimeProfile, workload: str) -> None:
    smooth = found_stairs.model_copy(update={"launch_spread": None})
    assert differences(smooth, workload, **{**STAIRS, "jitter": Jitter()}) == pytest.approx(
        dict.fromkeys(FIGURES, 0.0), abs=0.02
    )


@pytest.mark.full
def test_taken_for_a_slope_stairs_are_not_predicted(found_stairs: StepTimeProfile) -> None:
    decode = found_stairs.step_time["decode"] | {"sizes": ()}
    wrong = found_stairs.model_copy(
        update={"launch_spread": None, "step_time": found_stairs.step_time | {"decode": decode}}
    )
    assert differences(wrong, STEADY, **{**STAIRS, "jitter": Jitter()})["tpot p99"] < -0.03


@pytest.mark.full
def test_few_queries_after_many_tokens_take_as_long_as_their_row_is() -> None:
    profile = calibrated(length_s=3e-7)
    model = profile.make()
    for tokens, had in ((64, 3000), (128, 5900), (512, 0), (512, 5600), (1024, 3000)):
        attention = (
            2.6e-8 * (tokens + had)
            + 5e-10 * (tokens * had + tokens * (tokens + 1) // 2)
            + 3e-7 * (tokens + had)
        )
        assert model.seconds(shape((tokens, had))) == pytest.approx(
            max(1.9e-3, 1.2e-3 + 2.4e-6 * tokens) + attention, rel=0.05
        ), (tokens, had)
    assert differences(profile, BURSTS, "sarathi", length_s=3e-7) == pytest.approx(
        dict.fromkeys(FIGURES, 0.0), abs=0.03
    )


@pytest.mark.full
def test_it_is_found_out_what_a_request_that_begins_adds_to_launching() -> None:
    profile = calibrated(joining_s=4e-4)
    assert profile.joining_s == pytest.approx(4e-4, rel=0.02)
    launch, prompt = profile.make_launch(), shape((300, 0), *decodes(10, 300))
    assert profile.launching_s(launch, prompt, joins=True) == pytest.approx(1.3e-3, rel=0.02)
    assert profile.launching_s(launch, prompt, joins=False) == pytest.approx(9e-4, rel=0.02)
    assert profile.launching_s(launch, shape(*decodes(10, 300)), joins=False) == pytest.approx(
        3e-4, rel=0.05
    ), "decodes have nothing of it"
    assert differences(profile, BURSTS, "sarathi", joining_s=4e-4) == pytest.approx(
        dict.fromkeys(FIGURES, 0.0), abs=0.03
    )


@pytest.mark.full
def test_a_machine_that_replays_only_decodes_is_predicted() -> None:
    profile = calibrated(graphs=())
    assert profile.recorded_tokens == 0
    assert differences(profile, BUSY, graphs=()) == pytest.approx(
        dict.fromkeys(FIGURES, 0.0), abs=0.05
    )


@pytest.mark.full
def test_tails_need_the_spread_of_launching(monkeypatch: pytest.MonkeyPatch) -> None:
    # so many launches know their mean well: what is wrong then isn't chance
    monkeypatch.setattr("dovetail_lab.calibrate.REHEARSAL_S", 24.0)
    jitter = Jitter(shares=(0.85, 0.15), times=(1.0, 5.0))
    profile = calibrated(jitter=jitter)
    with_it = differences(profile, SHORT, seeds=8, jitter=jitter)
    without = differences(profile.model_copy(update={"launch_spread": None}), SHORT, jitter=jitter)
    assert with_it == pytest.approx(dict.fromkeys(FIGURES, 0.0), abs=0.05)
    assert all(without[figure] < -0.05 for figure in FIGURES if "p99" in figure)


BUSY_HOST: dict[str, Any] = {
    "busy": 1.8,
    "request_s": 1e-3,
    "setup_s": 2e-4,
    "decode_launch_s": 5e-4,
    "jitter": Jitter((0.9, 0.1), (1.0, 1.5)),
}


@pytest.fixture(scope="module")
def found_busy() -> Calibration:
    """Launching and delivering take longer, the device sets steps up, and requests are taken in,
    only while requests come and go: in the rehearsal, and in runs."""
    with machine(**BUSY_HOST):
        return calibrate(MACHINE, time_limit_s=600)


@pytest.mark.full
def test_what_the_host_takes_is_what_it_takes_while_requests_come_and_go(
    found_busy: Calibration,
) -> None:
    grid, found = profile_of(gridded(found_busy), True, name="grid"), found_busy.profile
    launch, grids = found.make_launch(), grid.make_launch()
    assert launch is not None
    assert grids is not None
    for rows in (
        decodes(5, 300),
        decodes(100, 300),
        [(100, 0), *decodes(10, 300)],
        [(700, 900), *decodes(30, 900)],
    ):
        assert launch.seconds(shape(*rows)) == pytest.approx(
            BUSY_HOST["busy"] * grids.seconds(shape(*rows)), rel=0.12
        ), rows
    assert found.results_s == pytest.approx(BUSY_HOST["busy"] * RESULTS_S, rel=0.01)
    assert found.request_s == pytest.approx(BUSY_HOST["request_s"], rel=0.01)
    assert found.setup_s == pytest.approx(BUSY_HOST["setup_s"], abs=5e-5)
    assert (found.step_time, found.recorded_tokens, found.error) == (
        grid.step_time,
        grid.recorded_tokens,
        grid.error,
    ), "what the device computes is the grid's"


@pytest.mark.full
def test_of_launching_neither_the_level_nor_the_spread_counts_twice(
    found_busy: Calibration,
) -> None:
    profile = found_busy.profile
    launch, drawn = profile.make_launch(), profile.launch_spread
    assert launch is not None
    assert drawn is not None
    for regime, rows in (
        (Regime.DECODE, decodes(12, 500)),
        (Regime.RECORDED, [(400, 0), *decodes(12, 500)]),
    ):
        mean = float(np.dot(drawn.of(regime), np.diff(LEVELS)))
        without_jitter = (
            BUSY_HOST["decode_launch_s"] + 5e-7 * 12 if regime is Regime.DECODE else 9e-4
        )
        true = BUSY_HOST["busy"] * BUSY_HOST["jitter"].mean * without_jitter
        assert mean * launch.seconds(shape(*rows)) == pytest.approx(true, rel=0.04), regime


@pytest.mark.full
def test_a_busy_host_is_predicted_which_from_the_grid_alone_it_is_not(
    found_busy: Calibration,
) -> None:
    grid = profile_of(gridded(found_busy), True, name="grid")
    with_it, without = (
        differences(profile, SHORT, seeds=2, **BUSY_HOST) for profile in (found_busy.profile, grid)
    )
    assert with_it == pytest.approx(dict.fromkeys(FIGURES, 0.0), abs=0.05)
    assert all(without[f"{metric} p50"] < -0.05 for metric in ("ttft", "tpot", "e2e"))


@pytest.mark.full
def test_a_rehearsal_keeps_some_rows_decoding_and_the_device_from_being_swamped(
    measured_machine: Calibration,
) -> None:
    rehearsed = [sighting for sighting in measured_machine.sightings if sighting.rehearsed]
    assert 4 < rehearsed[-1].ended - rehearsed[0].planned < 6
    assert 8 < np.mean([sighting.shape.rows for sighting in rehearsed]) < 16
    assert sum(sighting.shape.prefill_rows > 0 for sighting in rehearsed) > 100


def test_an_engine_too_slow_for_a_rehearsal_has_the_grids_times() -> None:
    slow = {"name": "slow", "step_time": {"kind": "linear", "base_s": 2.0}, "results_s": 0.25}
    made = calibrate(
        {**pretended(), "executor": {"name": "simulated", "num_pages": 8000, "step_time": slow}},
        quick=True,
    )
    assert len(gridded(made)) > len(made.sightings) - 20
    assert made.profile.results_s == pytest.approx(0.25, rel=0.01)


@pytest.mark.full
def test_the_grid_of_an_8b_model_takes_less_than_40_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "dovetail_lab.calibration_grid.ROUNDS", 1
    )  # the second is for what time is left
    step_time = {
        "kind": "linear",
        "base_s": 0.0042,
        "per_token_s": 2.2e-5,
        "per_context_s": 3.7e-8,
        "per_pair_s": 3e-10,
    }
    sizes = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "max_model_len": 16_384}
    made = calibrate(
        {
            **MACHINE,
            **sizes,
            "executor": {
                "name": "simulated",
                "num_pages": 50_000,
                "step_time": step_time,
                "core_s": 3e-4,
            },
        }
    )
    assert made.complete
    assert (
        max(sighting.ended for sighting in gridded(made)) < 40
    )  # of 54: the rest is for what the engine does besides


@pytest.mark.full
def test_a_third_of_the_first_round_is_enough_for_a_profile(
    measured_machine: Calibration, found_machine: StepTimeProfile
) -> None:
    sightings = gridded(measured_machine)
    partial = profile_of(sightings[: len(sightings) // 6], True, name="partial")
    assert partial.recorded_tokens == GRAPHS[-1]
    for rows in (
        decodes(20, 500),
        [(300, 0)],
        [(1200, 0)],
        [(300, 0), *decodes(20, 500)],
        [(3000, 0)],
    ):
        assert partial.make().seconds(shape(*rows)) == pytest.approx(
            found_machine.make().seconds(shape(*rows)), rel=0.03
        )


@pytest.mark.full
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(8, id="noted before `added`", marks=pytest.mark.full),
        pytest.param(10, id="noted before there was a rehearsal"),
        pytest.param(11, id="noted now"),
    ],
)
def test_a_profile_is_fitted_anew_from_what_was_sighted(
    measured_machine: Calibration, tmp_path: Path, fields: int
) -> None:
    profile = tmp_path / "h200-x.json"
    measured_machine.profile.save(profile)
    sighted = measured_machine.sightings if fields == 11 else gridded(measured_machine)
    (tmp_path / "sightings-x.json").write_text(
        json.dumps([astuple(sighting)[:fields] for sighting in sighted])
    )
    fit_anew(Archive(tmp_path / "own.tgz", tmp_path), "x", profile)
    again = StepTimeProfile.load(str(profile))
    assert again.recorded_tokens == measured_machine.profile.recorded_tokens
    assert again.sampling_share == pytest.approx(measured_machine.profile.sampling_share, abs=0.01)
    assert (again == measured_machine.profile) == (fields == 11)


def test_of_launch_bound_steps_the_bound_is_respected() -> None:
    steps = [shape(*decodes(rows, context)) for rows in range(1, 40) for context in (10, 900)]
    known = [Measurement((step,), TRUE.seconds(step)) for step in steps]
    large = [shape((tokens, 0)) for tokens in range(2000, 3000, 20)]
    small = shape((30, 0))
    model = fit_regimes(
        [*known, *(Measurement((step,), 0.1) for step in large)],
        at_most=[Measurement((small,), 0.01)] * 9,
    )
    assert model.seconds(small) <= 0.011


def test_hiccups_are_left_out() -> None:
    steps = [shape(*decodes(rows, context)) for rows in range(1, 40) for context in (10, 900)]
    steps += [
        shape((tokens, 0), *decodes(8, context))
        for tokens in range(10, 900, 20)
        for context in (10, 900)
    ]
    times = [
        TRUE.seconds(step) * (30 if index % 17 == 5 else 1) for index, step in enumerate(steps)
    ]
    model = fit_regimes(
        [Measurement((step,), seconds) for step, seconds in zip(steps, times, strict=True)]
    )
    for step in steps:
        assert model.seconds(step) == pytest.approx(TRUE.seconds(step), rel=0.05)


@pytest.mark.slow("calibrates an engine")
def test_when_time_runs_out_the_profile_notes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", count().__next__)
    made = calibrate(pretended(), time_limit_s=600)
    assert not made.complete
    assert "time ran out before all of the grid was measured" in made.profile.notes
    assert made.profile.make().seconds(shape(*decodes(1, 512))) == pytest.approx(
        TRUE.seconds(shape(*decodes(1, 512))), rel=0.05
    )


@pytest.mark.slow("calibrates two engines")
def test_an_engine_too_small_for_the_grid_is_measured_over_the_tiny_one() -> None:
    small = calibrate({**pretended(), "max_model_len": 128, "max_num_seqs": 4}).profile
    assert small.make().seconds(shape(*decodes(4, 50))) == pytest.approx(
        TRUE.seconds(shape(*decodes(4, 50))), rel=0.02
    )


def test_an_engine_with_no_room_at_all_says_what_it_takes() -> None:
    with pytest.raises(ConfigError, match=r"expected a max_model_len of 41 or more, .*; got 40"):
        calibrate({**pretended(), "max_model_len": 40})


def test_a_model_that_only_embeds_is_refused() -> None:
    fake = "dovetail.testing.fake_executor:FakeExecutor"
    registry = registry_with(component("executor", "fake", fake, f"{fake}Options"))
    embeds = {"tasks": ["embed"], "method": "mean", "size": 8, "generates": False}
    with pytest.raises(ConfigError, match="measures steps that generate"):
        calibrate(
            {**pretended(), "executor": {"name": "fake", "pooling": embeds}}, registry=registry
        )


def test_too_little_time_is_an_error() -> None:
    with pytest.raises(ConfigError, match="time limit is too short"):
        calibrate(pretended(), time_limit_s=0)


@pytest.mark.slow("makes a checkpoint, and starts a process that prepares images")
def test_what_an_image_takes_is_found_out_by_its_rows() -> None:
    pytest.importorskip("torch", reason="the checkpoint is made with torch")
    from tests.media.checkpoints import checkpoint

    sizes = {"shortest_edge": 256, "longest_edge": 10**7}
    config = {**pretended(image_s=0.02, image_row_s=3e-5), "media": {"processor": {"size": sizes}}}
    profile = calibrate({**config, "model": str(checkpoint("qwen3_vl"))}, quick=True).profile
    assert profile.image_s == pytest.approx(0.02, rel=0.05)
    assert profile.image_row_s == pytest.approx(3e-5, rel=0.05)


@pytest.mark.slow("makes a checkpoint and an engine, and starts a process that prepares images")
def test_a_real_encoder_is_measured() -> None:
    pytest.importorskip("torch", reason="the checkpoint is made with torch")
    from tests.media.checkpoints import checkpoint

    config = {
        "model": str(checkpoint("mistral3")),
        "executor": {"name": "local", "device": "cpu", "threads": 1},
        "max_num_seqs": 4,
        "max_model_len": 256,
        "kv_cache_memory": "16MiB",
    }
    profile = calibrate(config, quick=True, time_limit_s=20).profile
    default = StepTimeProfile.model_fields["image_s"].default
    assert 0 <= profile.image_s != default


@pytest.mark.slow("simulates many requests")
def test_a_real_engine_gives_a_profile_that_simulates(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the demo model computes with torch")
    (tmp_path / "engine.yaml").write_text(
        "model: demo\nexecutor: {name: local, device: cpu, threads: 1}\nmax_num_seqs: "
        "4\nmax_model_len: 128\nkv_cache_memory: 16MiB\n"
    )
    printed = lab("calibrate", tmp_path / "engine.yaml", "--out", tmp_path / "mine.json", "--quick")
    profile = StepTimeProfile.load(str(tmp_path / "mine.json"))
    assert profile.name == "mine"
    assert profile.machine.startswith("cpu")
    assert "executor local" in profile.engine
    assert profile.error is not None
    assert profile.core_s > 0
    assert profile.request_s > 0
    assert profile.kv_tokens
    assert f"off by {profile.error:.1%}" in printed
    run = (
        "run",
        tmp_path / "engine.yaml",
        "--trace",
        "arrivals=at_once requests=4 prompt=20 output=5",
    )
    simulated = lab(*run, "--step-time", tmp_path / "mine.json")
    assert "4 of 4 requests completed" in simulated
    [conditions, real] = (
        [line for line in text.splitlines() if line.startswith("overlap ")]
        for text in (simulated, lab(*run, "--real"))
    )
    assert conditions == real
    assert conditions[0].startswith("overlap off, ")


@pytest.mark.parametrize(
    ("executor", "out", "says"),
    [
        ("local", "profile.txt", "--out"),
        ("local", "engine.yaml/profile.json", "--out"),
        ("{name: simulated, num_pages: 9}", "profile.json", "simulated"),
    ],
)
def test_bad_input_says_what_is_wrong(tmp_path: Path, executor: str, out: str, says: str) -> None:
    (tmp_path / "engine.yaml").write_text(
        f"model: demo\nexecutor: {executor}\nmax_model_len: 128\n"
    )
    assert says in lab("calibrate", tmp_path / "engine.yaml", "--out", tmp_path / out, fails=True)


@given(st.integers(0, 10_000), st.integers(1, 8), st.integers(0, 12))
@examples(quick=60, full=1000)
def test_nonnegative_least_squares_is_as_good_as_scipys(seed: int, columns: int, more: int) -> None:
    from scipy.optimize import nnls  # type: ignore[import-untyped]

    random = np.random.default_rng(seed)
    matrix, target = (
        random.normal(size=(columns + more, columns)),
        random.normal(size=columns + more),
    )
    ours, (_, least) = nonnegative_least_squares(matrix, target), nnls(matrix, target)
    assert (ours >= 0).all()
    assert np.linalg.norm(matrix @ ours - target) == pytest.approx(least, abs=1e-9)
