"""Real vLLM 0.19.0, simulated: 300 chats at 10 a second on RTX PRO 6000s, as LLMServingSim's authors measured them.

    python -m bench.lab.vllm_measured --traces DIR                         # fits both models: five minutes
    python -m bench.lab.vllm_measured --traces DIR --profiles              # with the profiles that the lab ships, which this script wrote
    python -m bench.lab.vllm_measured --traces DIR --out plugins/lab/dovetail_lab/profiles
    python -m bench.lab.vllm_measured --traces DIR --runs HARDWARE__MODEL  # another run of the same kind

Five coefficients of a linear step-time model are fitted, for each model by itself, so that the simulated times of the first 150 requests come close
to the measured ones; nothing measured of the last 150 is used. Then all 300 are simulated, and the last 150 compared. The first half is busy from
beginning to end, so it can't tell reading the weights from reading K and V; both are held near what the model's sizes and the GPU's bandwidth say.

What vLLM did, in Dovetail's words: `fcfs` with the budget and the seats that `meta.json` names (2,048 tokens, 128 requests), decodes first, prompts
cut into chunks, with no limit on how much longer they make a step; overlap on, each step planned as soon as there is room for it, not late; blocks of
16, a pool that never fills. Prefix reuse is off: the prompts, of which only lengths are known, share nothing that could be seen.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.lab.checks import Figure, arguments, print_figures
from dovetail_lab.records import RunResult
from dovetail_lab.simulate import replay
from dovetail_lab.step_time import LinearStepTime, StepTimeProfile
from dovetail_lab.traces import Trace, load_trace

Floats = NDArray[np.float64]

FIRST_HALF = 150
WITHIN = 0.06
TERMS = ("base_s", "per_token_s", "per_context_s", "per_pair_s", "per_row_s")
RUNS = {  # of the measurements -> the profile that came of it
    "RTXPRO6000__Llama-3.1-8B": "rtxpro6000-llama-3.1-8b",
    "RTXPRO6000__Qwen3-32B": "rtxpro6000x2-qwen3-32b",
}
SIZES = {  # of known dense models: parameters, and elements of K and V that a token takes (2 x layers x KV heads x head size)
    "meta-llama/Llama-3.1-8B": (8.03e9, 2 * 32 * 8 * 128),
    "Qwen/Qwen3-32B": (32.76e9, 2 * 64 * 8 * 128),
}
BYTES = 2  # of bfloat16
NEAR = 1.0  # weight of the squared logarithm by which a coefficient is away from the data sheet's; the misfit itself is about 0.4
FIRST_STEP = 0.2  # of the search, in logarithms
TOLERATED = 0.05  # relative errors beyond this count linearly, not squared


def engine(step_time: dict[str, Any], seats: int = 128, budget: int = 2048) -> dict[str, Any]:
    return {
        "scheduler": {"name": "fcfs", "max_stretch": None},
        "kv_cache": {"name": "prefix", "reuse": False},
        "executor": {"name": "simulated", "plans_late": False, "num_blocks": 26_000, "step_time": step_time},
        "overlap": True,
        "block_size": 16,
        "max_num_seqs": seats,
        "max_num_batched_tokens": budget,
        "max_model_len": 40_960,
    }


def times(arrival: Floats, first: Floats, last: Floats, tokens: Floats) -> dict[str, Floats]:
    return {"TTFT": first - arrival, "TPOT": (last - first) / (tokens - 1), "E2E": last - arrival}


def simulated_times(result: RunResult) -> dict[str, Floats]:
    rows = [(r.arrival_s, r.token_times_s[0], r.token_times_s[-1], r.output_tokens) for r in result]
    return times(*np.array(rows, np.float64).T)


def measured_times(trace: Trace) -> dict[str, Floats]:
    rows = [(r.arrival_time, r.measured.first_token_time, r.measured.last_token_time, r.output_tokens) for r in trace if r.measured]
    return times(*np.array(rows, np.float64).T)


def misfit(simulated: dict[str, Floats], measured: dict[str, Floats]) -> float:
    """Over the first half. A TTFT of less than 0.3 s counts as one of 0.3 s: below that it is chance which step a request meets."""
    first = slice(0, FIRST_HALF)
    errors = [
        (simulated["TTFT"] - measured["TTFT"])[first] / np.maximum(measured["TTFT"][first], 0.3),
        np.log(simulated["TPOT"] / measured["TPOT"])[first],
        np.log(simulated["E2E"] / measured["E2E"])[first],
    ]
    return float(np.mean(2 * (np.sqrt(1 + (np.concatenate(errors) / TOLERATED) ** 2) - 1)))


@dataclass(frozen=True, slots=True)
class Measured:
    """One run: what was sent, and how the engine was set up."""

    name: str
    trace: Trace
    meta: dict[str, Any]
    bytes_per_s: float  # of one GPU's memory

    @classmethod
    def load(cls, folder: Path, name: str) -> Measured:
        meta, config = (json.loads((folder / f"{name}__{what}.json").read_text()) for what in ("meta", "config"))
        bandwidth = config["nodes"][0]["instances"][0]["npu_mem"]["mem_bw"]  # GB/s
        return cls(name, load_trace(folder / f"{name}__requests.jsonl"), meta["engine_kwargs"], bandwidth * 1e9)

    def simulated(self, step_time: dict[str, Any]) -> dict[str, Floats]:
        config = engine(step_time, self.meta["max_num_seqs"], self.meta["max_num_batched_tokens"])
        return simulated_times(replay(config, self.trace))

    def by_data_sheet(self) -> dict[str, float]:
        """Seconds for the weights and for one token's K and V, read once by GPUs that share them; nothing for a model of unknown sizes."""
        if self.meta["model"] not in SIZES:
            return {}
        per_s = self.bytes_per_s * self.meta["tensor_parallel_size"]
        parameters, elements = SIZES[self.meta["model"]]
        return {"base_s": BYTES * parameters / per_s, "per_context_s": BYTES * elements / per_s}

    def first_guess(self) -> dict[str, float]:
        """Where the search begins: half of the quickest answer's TPOT is the base; the first request, which is alone, tells what a prompt token
        takes; what a typical TPOT is beyond the base is half context, a quarter rows. The data sheet, where there is one, knows better."""
        measured, seats = measured_times(self.trace), self.meta["max_num_seqs"]
        first_half = slice(0, FIRST_HALF)
        base = 0.5 * float(measured["TPOT"][first_half].min())
        per_token = float(measured["TTFT"][0]) / self.trace.requests[0].prompt_tokens
        beyond = float(np.median(measured["TPOT"][first_half])) - base
        context = seats * float(np.mean([one.prompt_tokens + one.output_tokens / 2 for one in self.trace]))
        guess = dict(zip(TERMS, (base, per_token, 0.5 * beyond / context, 1e-5 * per_token, 0.25 * beyond / seats), strict=True))
        return guess | self.by_data_sheet()

    def fit(self, evaluations: int) -> LinearStepTime:
        """Nelder and Mead's simplex over the logarithms of the coefficients; each evaluation simulates the whole run."""
        from scipy.optimize import minimize  # type: ignore[import-untyped]

        measured, guess = measured_times(self.trace), self.first_guess()
        start = np.log(list(guess.values()))
        known = [TERMS.index(term) for term in self.by_data_sheet()]

        def model(logarithms: Floats) -> LinearStepTime:
            return LinearStepTime.model_validate(dict(zip(TERMS, np.exp(logarithms).tolist(), strict=True)))

        def cost(logarithms: Floats) -> float:
            away = float(((logarithms - start)[known] ** 2).sum())
            return misfit(self.simulated(model(logarithms).model_dump()), measured) + NEAR * away

        simplex = np.vstack([start, start - FIRST_STEP * np.eye(len(start))])
        found = minimize(cost, start, method="Nelder-Mead", options={"initial_simplex": simplex, "maxfev": evaluations, "fatol": 1e-4, "xatol": 1e-3})
        return model(found.x)


def figures(simulated: dict[str, Floats], measured: dict[str, Floats], part: slice) -> list[Figure]:
    found = []
    for name in measured:
        ours, theirs = simulated[name][part], measured[name][part]
        found.append(Figure(f"{name} mean, s", float(ours.mean()), float(theirs.mean()), WITHIN))
        found += [Figure(f"{name} p{q}, s", float(np.percentile(ours, q)), float(np.percentile(theirs, q)), WITHIN) for q in (50, 90, 99)]
    return found


def profile_of(model: LinearStepTime, run: Measured, held_out: list[Figure]) -> StepTimeProfile:
    error = float(np.mean([abs(figure.difference) for figure in held_out]))
    gpus = run.meta["tensor_parallel_size"]
    return StepTimeProfile(
        name=RUNS.get(run.name, run.name.lower()),
        step_time=model.model_dump(mode="json"),
        error=round(error, 4),
        judged_on=f"means and percentiles of TTFT, TPOT and E2E of {len(run.trace) - FIRST_HALF} requests that it wasn't fitted on",
        machine=f"{gpus} x {run.name.split('__')[0]}",
        model=run.meta["model"],
        engine="vLLM 0.19.0, its own time included",
        source="bench/examples of github.com/casys-kaist/LLMServingSim, MIT",
    )


def check(run: Measured, model: LinearStepTime) -> list[Figure]:
    """Prints both halves, and returns the second."""
    simulated, measured = run.simulated(model.model_dump()), measured_times(run.trace)
    print(f"\n{run.name}: {', '.join(f'{term} {getattr(model, term):.4g}' for term in TERMS)}", flush=True)
    print_figures("first half, fitted on", figures(simulated, measured, slice(0, FIRST_HALF)))
    held_out = figures(simulated, measured, slice(FIRST_HALF, None))
    print_figures("second half, out of sample", held_out)
    return held_out


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--runs", nargs="+", default=list(RUNS), metavar="HARDWARE__MODEL", help="which measurements, by the names of their files")
    parser.add_argument("--profiles", action="store_true", help="use the shipped profiles instead of fitting")
    parser.add_argument("--evaluations", type=int, default=110, help="simulations that a fit may take")
    parser.add_argument("--out", type=Path, help="a folder to write the profiles to")
    args = parser.parse_args()
    held = True
    for name in args.runs:
        run = Measured.load(args.traces / "vllm_measured", name)
        model = LinearStepTime.model_validate(StepTimeProfile.load(RUNS[name]).step_time) if args.profiles else run.fit(args.evaluations)
        held_out = check(run, model)
        held = held and all(figure.holds for figure in held_out)
        if args.out:
            profile = profile_of(model, run, held_out)
            profile.save(args.out / f"{profile.name}.json")
    raise SystemExit(not held)


if __name__ == "__main__":
    main()
