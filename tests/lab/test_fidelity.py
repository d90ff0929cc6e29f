"""Small slices of what `bench/lab` checks in full: the simulator beside measurements by others
(`data/README.md`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from bench.lab.vllm_measured import engine, measured_times, simulated_times
from bench.lab.vllm_run import VLLMRun
from bench.lab.vllm_scheduling import registry
from bench.lab.vtc_served import (
    BEGINNING,
    HOST,
    KNOTS,
    Served,
    ServedRun,
    answers_off_by,
    fit_server,
    single_batches,
)

from dovetail_lab.fitting import Measurement, fit_piecewise, relative_errors
from dovetail_lab.simulate import replay
from dovetail_lab.step_profile import StepTimeProfile
from dovetail_lab.traces import Trace, load_trace
from dovetail_lab.workloads import load_workload

DATA = Path(__file__).parent / "data"
# how vLLM was set up
RUN = VLLMRun(
    "", Trace("", "", ()), "", None, 1, 1, 128, 2048, 40_960, 16, 26_000, False, True, 2, 1597e9
)
UNDISTURBED = slice(0, 50)  # requests whose first token came before the slice ends


@pytest.mark.slow("simulates many requests")
def test_time_to_first_token_is_that_of_a_real_vllm_while_it_fills_up() -> None:
    trace = load_trace(DATA / "vllm_llama_3.1_8b.jsonl")
    step_time = StepTimeProfile.load("rtxpro6000-llama-3.1-8b").step_time
    simulated = simulated_times(replay(engine(RUN, step_time), trace, registry=registry()))["TTFT"][
        UNDISTURBED
    ]
    measured = measured_times(trace)["TTFT"][UNDISTURBED]
    assert abs(simulated.mean() / measured.mean() - 1) < 0.06
    assert abs(np.median(simulated) / np.median(measured) - 1) < 0.06
    assert np.corrcoef(simulated, measured)[0, 1] > 0.85


def test_a_piecewise_model_fits_an_a10g_to_a_few_percent() -> None:
    timings = single_batches(DATA / "a10g_llama_7b.json")
    model = fit_piecewise(timings, KNOTS, terms=("per_context_s",))
    errors = np.abs(relative_errors(model, timings))
    assert errors.mean() < 0.04
    shipped = StepTimeProfile.load("a10g-llama-2-7b").make()
    assert np.abs(relative_errors(shipped, timings)).mean() < 0.04


@pytest.mark.slow("simulates many requests")
def test_the_hosts_own_times_follow_from_answers_of_a_server_that_was_full_and_idle() -> None:
    """A server of known times is simulated, its clients' times are all that the fit sees, and the
    fit finds the host's times."""
    device = StepTimeProfile.load("a10g-llama-2-7b").step_time
    host = dict(zip(HOST, (0.0, 1e-4, 8e-3, 1e-3), strict=True))
    known = StepTimeProfile(name="known", step_time=device, kv_tokens=10_000, **host)
    full, idle = (
        _served(
            known,
            f"duration=60 arrivals=poisson({rate}) prompt=uniform(10, 400) output=uniform(60, 300)",
        )
        for rate in (3, 0.3)
    )
    batches = single_batches(DATA / "a10g_llama_7b.json")
    as_computed = [
        Measurement(one.shapes, sum(known.make().seconds(shape) for shape in one.shapes))
        for one in batches
    ]
    found = fit_server(as_computed, [full, idle])
    for rows, admitted in ((1, 0), (25, 0), (10, 1), (25, 4)):
        assert found.profile.planning_s(rows, admitted) == pytest.approx(
            known.planning_s(rows, admitted), rel=0.2, abs=2e-4
        )
    other = _served(
        known, "duration=20 arrivals=poisson(2) prompt=uniform(10, 400) output=uniform(60, 300)"
    )
    assert answers_off_by(found, other) < 0.003


def _served(profile: StepTimeProfile, workload: str) -> ServedRun:
    config = {
        "scheduler": {"name": "lightllm", "batch_max_tokens": 3072},
        "kv_cache": {"name": "prefix", "reuse": False},
        "executor": {"name": "simulated", "step_time": profile.model_dump(mode="json")},
        "overlap": False,
        "block_size": 1,
        "max_num_seqs": 1000,
        "max_num_batched_tokens": 3072,
        "max_model_len": 3072,
    }
    result = replay(config, load_workload(workload))
    times = [
        (one.arrival_s, float(one.token_times_s[0]), float(one.token_times_s[-1])) for one in result
    ]
    requests = tuple(
        Served("c", *own, one.prompt_tokens - BEGINNING, one.output_tokens)
        for own, one in zip(times, result, strict=True)
    )
    return ServedRun("made", requests, max(last for _, _, last in times))
