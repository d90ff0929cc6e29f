"""The VTC paper's measured run, simulated: 1,500 Arena requests of 27 clients on an A10G with a KV pool of 10,000 tokens (arXiv:2401.00588).

    python -m bench.lab.vtc_arena --traces DIR                      # two minutes
    python -m bench.lab.vtc_arena --traces DIR --profile out.json   # and keep the step times

Step times are fitted on the paper's profile of single batches alone. One constant is left, the server's own time a step, which is set so that FCFS
has the measured throughput; LCF and VTC are then predictions. Overlap off, prefix reuse off, blocks of one token, prompts of at most 3,072 tokens
admitted at once, no oftener than every 10 decode steps, with memory reserved for each answer's true length, which the benchmark sends as
`max_new_tokens`.

Who is admitted first is chaotic: a request that comes a moment later changes all that follows, and the difference in service by a tenth. So every
arrival is put off by up to 20 ms at random, as a network does, and the figures are means over `--repeats` runs; how far those lie apart is
printed, too.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.lab.checks import Figure, arguments, print_figures
from dovetail_lab.fairness import Work, arena_centres, service_difference, service_over_time, work_of
from dovetail_lab.fitting import Measurement, fit_piecewise, relative_errors
from dovetail_lab.metrics import measure
from dovetail_lab.records import RunResult
from dovetail_lab.simulate import replay
from dovetail_lab.step_time import StepShape, StepTimeProfile
from dovetail_lab.traces import Trace, load_trace

ORDERS = {"FCFS": "arrival", "LCF": "lcf", "VTC": "vtc"}  # the paper's name -> that of `lightllm`
KNOTS = (1, 64, 256, 10_000)  # tokens: up to 64 rows share a tile of the products
WINDOW_S = 60.0
POOL_TOKENS = 10_000
LATEST_S = 0.02
WITHIN = {"service difference": 0.10, "tokens/s": 0.03, "mean TTFT, s": 0.05}


def measurements(path: Path) -> list[Measurement]:
    """Return two measurements of each (input, output): `batch` prompts at once, and `output` decodes of them. The file has seconds a request."""
    found = []
    for prompt, outputs in json.loads(path.read_text()).items():
        for output, (batch, prefill_s, decode_s) in outputs.items():
            ones, had = np.ones(batch, np.int64), np.zeros(batch, np.int64)
            found.append(Measurement((StepShape.of(ones * int(prompt), had),), batch * prefill_s))
            decodes = tuple(StepShape.of(ones, had + int(prompt) + done) for done in range(int(output)))
            found.append(Measurement(decodes, batch * decode_s))
    return found


def fitted(traces: Path) -> StepTimeProfile:
    steps = measurements(traces / "vtc_arena" / "cost_profile_a10g_llama7b.json")
    model = fit_piecewise(steps, KNOTS, terms=("per_context_s",))
    return StepTimeProfile(
        name="a10g-llama-2-7b",
        step_time=model.model_dump(mode="json"),
        error=float(np.abs(relative_errors(model, steps)).mean()),
        judged_on=f"the {len(steps)} timings that it was fitted on",
        kv_tokens=POOL_TOKENS,
        machine="NVIDIA A10G",
        model="Llama-2-7B",
        engine="S-LoRA (VTC's artifact)",
        source="cost_profile.json of github.com/Ying1123/VTC-artifact, Apache-2.0",
    )


def put_off(trace: Trace, seed: int) -> Trace:
    """Every request a little later."""
    rng = random.Random(seed)
    late = [replace(request, arrival_time=request.arrival_time + rng.uniform(0.0, LATEST_S)) for request in trace]
    return replace(trace, requests=tuple(sorted(late, key=lambda request: request.arrival_time)))


def run(order: str, trace: Trace, profile: StepTimeProfile, overhead_s: float, client_tokens: int) -> RunResult:
    config: dict[str, Any] = {
        "scheduler": {"name": "lightllm", "order": order, "every": 10, "batch_max_tokens": 3072, "client_tokens": client_tokens},
        "kv_cache": {"name": "prefix", "reuse": False},
        "executor": {"name": "simulated", "num_blocks": POOL_TOKENS, "step_time": profile.model_dump(mode="json"), "core_s": overhead_s},
        "overlap": False,
        "block_size": 1,
        "max_num_seqs": 1000,
        "max_num_batched_tokens": 3072,
        "max_model_len": 3072,
    }
    return replay(config, trace)


def throughput(result: RunResult) -> float:
    return measure(result).total_rate


def overhead_of(trace: Trace, profile: StepTimeProfile, target: float, client_tokens: int) -> float:
    """Seconds a step, with which FCFS has the throughput `target`: two steps of the secant method from 3 and 5 ms."""
    low, high = 0.003, 0.005
    at_low, at_high = (throughput(run("arrival", trace, profile, overhead, client_tokens)) for overhead in (low, high))
    for _ in range(2):
        low, at_low, high = high, at_high, high + (target - at_high) * (high - low) / (at_high - at_low)
        at_high = throughput(run("arrival", trace, profile, high, client_tokens))
    return round(high, 5)


def unfairness(work: list[Work]) -> float:
    return float(service_difference(service_over_time(work, arena_centres(), WINDOW_S)).mean())


def of_measured(path: Path) -> dict[str, float]:
    result = json.loads(path.read_text())["result"]
    work, tokens = [], 0
    for response in result["responses"]:
        arrival, prompt, output = response["req_time"], response["prompt_len"], response["output_len"]
        first, last = arrival + response["first_token_latency"], arrival + response["request_latency"]
        work.append(Work(response["adapter_dir"], arrival, first, last, prompt + 2.0 * output))
        tokens += prompt + output
    ttft = float(np.mean([one.first_token_s - one.arrival_s for one in work]))
    return dict(zip(WITHIN, (unfairness(work), tokens / result["total_time"], ttft), strict=True))


def of_simulated(result: RunResult) -> dict[str, float]:
    metrics = measure(result)
    return dict(zip(WITHIN, (unfairness(work_of(result)), metrics.total_rate, metrics.latencies["ttft"].mean), strict=True))


def mean_of(name: str, runs: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each figure, and print how far apart the runs are."""
    spread = "; ".join(f"{what} {min(run[what] for run in runs):.4g} to {max(run[what] for run in runs):.4g}" for what in WITHIN)
    print(f"{name}, {len(runs)} runs: {spread}", flush=True)
    return {what: float(np.mean([run[what] for run in runs])) for what in WITHIN}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--overhead", type=float, help="seconds a step, instead of finding it")
    parser.add_argument("--repeats", type=int, default=4, help="runs whose mean is taken")
    parser.add_argument("--client-tokens", type=int, default=0, help="of the pool, set aside for each client of the batch")
    parser.add_argument("--profile", type=Path, help="where to write the step times")
    args = parser.parse_args()
    folder = args.traces / "vtc_arena"
    trace, profile = load_trace(folder / "real_trace.csv"), fitted(args.traces)
    measured = {name: of_measured(folder / "measured" / f"{name}__real.jsonl") for name in ORDERS}
    overhead = args.overhead if args.overhead is not None else overhead_of(trace, profile, measured["FCFS"]["tokens/s"], args.client_tokens)
    print(f"step times: {profile.step_time}, off by {profile.error:.1%} on {profile.judged_on}; overhead {overhead * 1e3:.2f} ms a step")
    if args.profile:
        profile.model_copy(update={"core_s": overhead}).save(args.profile)
    trials = [put_off(trace, seed) for seed in range(args.repeats)]
    simulated = {
        name: mean_of(name, [of_simulated(run(order, trial, profile, overhead, args.client_tokens)) for trial in trials])
        for name, order in ORDERS.items()
    }
    held = [
        print_figures(name, [Figure(what, simulated[name][what], measured[name][what], within) for what, within in WITHIN.items()]) for name in ORDERS
    ]
    same_order = by_fairness(simulated) == by_fairness(measured)
    print(f"\nfrom fair to unfair: simulated {' '.join(by_fairness(simulated))}, measured {' '.join(by_fairness(measured))}")
    raise SystemExit(not (all(held) and same_order))


def by_fairness(figures: dict[str, dict[str, float]]) -> list[str]:
    return sorted(figures, key=lambda name: figures[name]["service difference"])


if __name__ == "__main__":
    main()
