"""Real vLLM 0.19.0, simulated: 300 chats at 10 a second on RTX PRO 6000s, as LLMServingSim's
authors measured them.

    python -m bench.lab.vllm_measured --traces DIR                         # fits both models: five minutes
    python -m bench.lab.vllm_measured --traces DIR --profiles              # with the profiles that the lab ships, which this script wrote
    python -m bench.lab.vllm_measured --traces DIR --out apps/lab/dovetail_lab/profiles
    python -m bench.lab.vllm_measured --traces DIR --runs HARDWARE__MODEL  # another run of the same kind
    python -m bench.lab.vllm_measured --traces DIR --runs HARDWARE__MODEL --step-time FILE    # by step times that were fitted on another run

The coefficients of a linear step-time model are fitted, for each run by itself, so that the
simulated times of the first 150 requests come close to the measured ones; nothing measured of the
last 150 is used. Then all 300 are simulated, and the last 150 compared. The first half is busy from
beginning to end, so it can't tell reading the weights from reading K and V, nor those of the
experts from the others; all of these are held near what the model's sizes and the GPU's bandwidth
say.

How the engine was set up is read from the run's own files (`vllm_run.py`), which also says what
can't be simulated. Who runs when is vLLM's own policy (`vllm_scheduling.py`); overlap is on, each
step planned as soon as there is room for it, not late. Prompts, of which only lengths are known,
share nothing; but with prefix reuse, vLLM's default, a preempted request finds what is left of its
own K and V. Replicas are engines of their own, dealt to as vLLM does; those of a mixture of experts
keep in step with each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.lab.checks import Figure, arguments, print_figures
from bench.lab.vllm_run import WEIGHT_BYTES, VLLMRun
from bench.lab.vllm_scheduling import NAME, registry
from dovetail_lab.records import RequestRecord
from dovetail_lab.replicas import replay_replicas
from dovetail_lab.routers import LeastLoaded
from dovetail_lab.step_profile import StepTimeProfile
from dovetail_lab.step_time import LinearStepTime, share_touched
from dovetail_lab.traces import Trace

Floats = NDArray[np.float64]

FIRST_HALF = 150
WITHIN = 0.06
TERMS = ("base_s", "per_token_s", "per_context_s", "per_pair_s", "per_row_s")
RUNS = {  # of the measurements -> the profile that came of it
    "RTXPRO6000__Llama-3.1-8B": "rtxpro6000-llama-3.1-8b",
    "RTXPRO6000__Qwen3-32B": "rtxpro6000x2-qwen3-32b",
}
# weight of the squared logarithm by which a coefficient is away from the data sheet's; the misfit
# itself is about 0.4
NEAR = 1.0
FIRST_STEP = 0.2  # of the search, in logarithms
TOLERATED = 0.05  # relative errors beyond this count linearly, not squared


def times(arrival: Floats, first: Floats, last: Floats, tokens: Floats) -> dict[str, Floats]:
    return {"TTFT": first - arrival, "TPOT": (last - first) / (tokens - 1), "E2E": last - arrival}


def simulated_times(records: Iterable[RequestRecord]) -> dict[str, Floats]:
    rows = [
        (r.arrival_s, r.token_times_s[0], r.token_times_s[-1], r.output_tokens) for r in records
    ]
    return times(*np.array(rows, np.float64).T)


def measured_times(trace: Trace) -> dict[str, Floats]:
    rows = [
        (r.arrival_time, r.measured.first_token_time, r.measured.last_token_time, r.output_tokens)
        for r in trace
        if r.measured
    ]
    return times(*np.array(rows, np.float64).T)


def misfit(simulated: dict[str, Floats], measured: dict[str, Floats]) -> float:
    """Over the first half. A TTFT of less than 0.3 s counts as one of 0.3 s: below that it is
    chance which step a request meets."""
    first = slice(0, FIRST_HALF)
    errors = [
        (simulated["TTFT"] - measured["TTFT"])[first] / np.maximum(measured["TTFT"][first], 0.3),
        np.log(simulated["TPOT"] / measured["TPOT"])[first],
        np.log(simulated["E2E"] / measured["E2E"])[first],
    ]
    return float(np.mean(2 * (np.sqrt(1 + (np.concatenate(errors) / TOLERATED) ** 2) - 1)))


def engine(run: VLLMRun, step_time: dict[str, Any]) -> dict[str, Any]:
    return {
        "scheduler": {"name": NAME},
        "prefill_limit": None,  # vLLM has none
        "kv_cache": {"name": "prefix", "reuse": run.reuse},
        "executor": {
            "name": "simulated",
            "plans_late": False,
            "num_pages": run.num_blocks,
            "step_time": step_time,
        },
        "overlap": True,
        "block_size": run.block_size,
        "max_num_seqs": run.max_num_seqs,
        "max_num_batched_tokens": run.budget,
        "max_model_len": min(run.longest, run.num_blocks * run.block_size),
    }


def simulated(run: VLLMRun, step_time: dict[str, Any]) -> dict[str, Floats]:
    config = engine(run, step_time)
    router = LeastLoaded()
    return simulated_times(
        replay_replicas(
            config, run.trace, run.replicas, router, in_step=run.in_step, registry=registry()
        )
    )


def by_data_sheet(run: VLLMRun) -> dict[str, float]:
    """Return the seconds for the weights, for one token's K and V, and for the weights of all
    experts, read once by GPUs that share them. Experts are shared by the GPUs of all replicas, all
    else by those of one. Nothing for a model of unknown sizes."""
    sizes = run.sizes
    per_s = run.bytes_per_s * run.gpus
    if sizes is None:
        return {}
    of_experts = sizes.experts * sizes.expert_weights
    found = {
        "base_s": WEIGHT_BYTES * (sizes.parameters - of_experts) / per_s,
        "per_context_s": run.kv_bytes * sizes.kv_numbers / per_s,
    }
    return (
        {**found, "experts_s": WEIGHT_BYTES * of_experts / per_s / run.replicas}
        if sizes.experts
        else found
    )


def experts_chosen(run: VLLMRun) -> dict[str, float]:
    """Return the share of the experts that one token of each replica chooses: they choose
    together."""
    if run.sizes is None or not run.sizes.experts:
        return {}
    return {
        "expert_share": share_touched(run.sizes.experts_per_token / run.sizes.experts, run.replicas)
    }


def first_guess(run: VLLMRun) -> dict[str, float]:
    """Return where the search begins: half of the quickest answer's TPOT is the base; the first
    request, which is alone, tells what a prompt token takes; what a typical TPOT is beyond the base
    is half context, a quarter rows. The data sheet, where there is one, knows better."""
    measured = measured_times(run.trace)
    first_half = slice(0, FIRST_HALF)
    base = 0.5 * float(measured["TPOT"][first_half].min())
    per_token = float(measured["TTFT"][0]) / run.trace.requests[0].prompt_tokens
    beyond = float(np.median(measured["TPOT"][first_half])) - base
    context = run.max_num_seqs * float(
        np.mean([one.prompt_tokens + one.output_tokens / 2 for one in run.trace])
    )
    guess = dict(
        zip(
            TERMS,
            (
                base,
                per_token,
                0.5 * beyond / context,
                1e-5 * per_token,
                0.25 * beyond / run.max_num_seqs,
            ),
            strict=True,
        )
    )
    return guess | by_data_sheet(run)


def fit(run: VLLMRun, evaluations: int) -> LinearStepTime:
    """Nelder and Mead's simplex over the logarithms of the coefficients; each evaluation simulates
    the whole run."""
    from scipy.optimize import minimize  # type: ignore[import-untyped]

    measured, guess, held = measured_times(run.trace), first_guess(run), by_data_sheet(run)
    start = np.log(list(guess.values()))
    known = [index for index, term in enumerate(guess) if term in held]

    def model(logarithms: Floats) -> LinearStepTime:
        return LinearStepTime.model_validate(
            dict(zip(guess, np.exp(logarithms).tolist(), strict=True)) | experts_chosen(run)
        )

    def cost(logarithms: Floats) -> float:
        away = float(((logarithms - start)[known] ** 2).sum())
        return misfit(simulated(run, model(logarithms).model_dump()), measured) + NEAR * away

    simplex = np.vstack([start, start - FIRST_STEP * np.eye(len(start))])
    found = minimize(
        cost,
        start,
        method="Nelder-Mead",
        options={"initial_simplex": simplex, "maxfev": evaluations, "fatol": 1e-4, "xatol": 1e-3},
    )
    return model(found.x)


def figures(simulated: dict[str, Floats], measured: dict[str, Floats], part: slice) -> list[Figure]:
    found = []
    for name in measured:
        ours = simulated[name][part]
        theirs = measured[name][part]
        found.append(Figure(f"{name} mean, s", float(ours.mean()), float(theirs.mean()), WITHIN))
        found += [
            Figure(
                f"{name} p{q}, s",
                float(np.percentile(ours, q)),
                float(np.percentile(theirs, q)),
                WITHIN,
            )
            for q in (50, 90, 99)
        ]
    return found


def profile_of(model: LinearStepTime, run: VLLMRun, held_out: list[Figure]) -> StepTimeProfile:
    error = float(np.mean([abs(figure.difference) for figure in held_out]))
    return StepTimeProfile(
        name=RUNS.get(run.name, run.name.lower()),
        step_time=model.model_dump(mode="json", exclude_defaults=True) | {"kind": model.kind},
        error=round(error, 4),
        judged_on=f"means and percentiles of TTFT, TPOT and E2E of {len(run.trace) - FIRST_HALF} "
        f"requests that it wasn't fitted on",
        machine=f"{run.replicas * run.gpus} x {run.name.split('__')[0]}",
        model=run.model,
        engine="vLLM 0.19.0, its own time included",
        source="bench/examples of github.com/casys-kaist/LLMServingSim, MIT",
    )


def check(run: VLLMRun, model: LinearStepTime, fitted: bool) -> list[Figure]:
    """Print both halves, and return what wasn't fitted: the second if the first was."""
    found = simulated(run, model.model_dump())
    measured = measured_times(run.trace)
    print(
        f"\n{run}\n{', '.join(f'{term} {value:.4g}' for term, value in model if term != 'kind' and value)}",
        flush=True,
    )
    first, second = (
        figures(found, measured, part) for part in (slice(0, FIRST_HALF), slice(FIRST_HALF, None))
    )
    print_figures("first half, fitted on" if fitted else "first half, not fitted on", first)
    print_figures("second half, not fitted on", second)
    return second if fitted else first + second


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--runs",
        nargs="+",
        default=list(RUNS),
        metavar="HARDWARE__MODEL",
        help="which measurements, by the names of their files",
    )
    parser.add_argument(
        "--profiles", action="store_true", help="use the shipped profiles instead of fitting"
    )
    parser.add_argument(
        "--step-time",
        metavar="PROFILE",
        help="use the linear step times of this file, or shipped profile, instead of fitting",
    )
    parser.add_argument(
        "--model-config",
        type=Path,
        metavar="FILE",
        help="config.json of a model that isn't known here",
    )
    parser.add_argument(
        "--more-blocks",
        type=int,
        default=0,
        help="simulate a pool with as many blocks more than recorded",
    )
    parser.add_argument(
        "--evaluations", type=int, default=110, help="simulations that a fit may take"
    )
    parser.add_argument("--out", type=Path, help="a folder to write the profiles to")
    args = parser.parse_args()
    held = True
    for name in args.runs:
        recorded = VLLMRun.load(args.traces / "vllm_measured", name, args.model_config)
        run = replace(recorded, num_blocks=recorded.num_blocks + args.more_blocks)
        known = args.step_time or (RUNS[name] if args.profiles else None)
        model = (
            LinearStepTime.model_validate(StepTimeProfile.load(known).step_time)
            if known
            else fit(run, args.evaluations)
        )
        unfitted = check(run, model, fitted=not args.step_time)
        held = held and all(figure.holds for figure in unfitted)
        if args.out:
            profile = profile_of(model, run, unfitted)
            profile.save(args.out / f"{profile.name}.json")
    raise SystemExit(not held)


if __name__ == "__main__":
    main()
