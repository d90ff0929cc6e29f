"""Small slices of what `bench/lab` checks in full: the simulator beside measurements by others (`data/README.md`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from bench.lab.vllm_measured import engine, measured_times, simulated_times
from bench.lab.vtc_arena import KNOTS, measurements

from dovetail_lab.fitting import fit_piecewise, relative_errors
from dovetail_lab.simulate import replay
from dovetail_lab.step_time import StepTimeProfile
from dovetail_lab.traces import load_trace

DATA = Path(__file__).parent / "data"
UNDISTURBED = slice(0, 50)  # requests whose first token came before the slice ends


def test_time_to_first_token_is_that_of_a_real_vllm_while_it_fills_up() -> None:
    trace = load_trace(DATA / "vllm_llama_3.1_8b.jsonl")
    step_time = StepTimeProfile.load("rtxpro6000-llama-3.1-8b").step_time
    simulated = simulated_times(replay(engine(step_time), trace))["TTFT"][UNDISTURBED]
    measured = measured_times(trace)["TTFT"][UNDISTURBED]
    assert abs(simulated.mean() / measured.mean() - 1) < 0.06
    assert abs(np.median(simulated) / np.median(measured) - 1) < 0.06
    assert np.corrcoef(simulated, measured)[0, 1] > 0.85


def test_a_piecewise_model_fits_an_a10g_to_a_few_percent() -> None:
    timings = measurements(DATA / "a10g_llama_7b.json")
    model = fit_piecewise(timings, KNOTS, terms=("per_context_s",))
    errors = np.abs(relative_errors(model, timings))
    assert errors.mean() < 0.04
    shipped = StepTimeProfile.load("a10g-llama-2-7b").make()
    assert np.allclose(relative_errors(model, timings), relative_errors(shipped, timings), atol=1e-6)
