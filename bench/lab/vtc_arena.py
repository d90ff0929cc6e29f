"""The VTC paper's measured runs, simulated: requests of up to 27 clients on an A10G with a KV pool
of 10,000 tokens (arXiv:2401.00588).

    python -m bench.lab.vtc_arena --traces DIR                      # five minutes
    python -m bench.lab.vtc_arena --traces DIR --profile out.json   # and keep the step times
    python -m bench.lab.vtc_arena --traces DIR --fit-on FCFS__real  # fits on one run, and predicts the others

Fitted are the device's times and the host's (`vtc_served.py`): on the paper's profile of single
batches, and on how long answers took in the two runs under FCFS. Then one factor for all of the
host's times, with which FCFS has the measured throughput of the Arena's requests. All other
figures, of FCFS too, are predictions; LCF and VTC are wholly so.

Overlap off, prefix reuse off, blocks of one token, prompts of at most 3,072 tokens admitted at
once, no oftener than every 10 decode steps. Memory is reserved for each answer's true length, which
the benchmark sends as `max_new_tokens`, and for the adapter of each client in the batch.

Who is admitted first is chaotic: a request that comes a moment later changes all that follows, and
the difference in service by a tenth. So every arrival is put off by up to 20 ms at random, as a
network does, and the figures are means over `--repeats` runs; how far those lie apart is printed,
too. Times to the first token count from when the request was sent.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.lab.checks import Figure, arguments, print_figures
from bench.lab.vtc_scheduling import NAME, registry
from bench.lab.vtc_served import (
    BEGINNING,
    HOST,
    POOL_TOKENS,
    ServedRun,
    Server,
    answers_off_by,
    fit_server,
    single_batches,
)
from dovetail_lab.fairness import (
    INPUT_WEIGHT,
    OUTPUT_WEIGHT,
    Work,
    arena_centres,
    service_difference,
    service_over_time,
)
from dovetail_lab.simulate import replay
from dovetail_lab.traces import Trace

ORDERS = {"FCFS": "arrival", "LCF": "lcf", "VTC": "vtc"}  # the paper's name -> that of `lightllm`
FITTED = ("FCFS__real", "FCFS__overload-multi")
RUNS = (*FITTED, "LCF__real", "VTC__real", "VTC__overload-multi")
# Measured in June 2024, with a server that charges the steps in which requests end twice
TWICE = (*RUNS, "VTC__overload")
WINDOW_S = 60.0
ADAPTER_TOKENS = 32  # of the pool: four matrices of rank 8
LATEST_S = 0.02
CLOSE = 0.05
WITHIN = {"service difference": 0.10, "tokens/s": 0.05, "mean TTFT, s": 0.05, "mean E2E, s": 0.05}

Figures = dict[str, float]


def put_off(trace: Trace, seed: int, latest_s: float = LATEST_S) -> Trace:
    """Return the trace with each request delayed by up to `latest_s`."""
    rng = random.Random(seed)
    late = [
        replace(request, arrival_time=request.arrival_time + rng.uniform(0.0, latest_s))
        for request in trace
    ]
    return replace(trace, requests=tuple(sorted(late, key=lambda request: request.arrival_time)))


def simulate(
    measured: ServedRun,
    server: Server,
    seed: int,
    *,
    steps: float = 1.0,
    latest_s: float = LATEST_S,
) -> Figures:
    """Return the figures of a simulated run whose steps take the device `steps` times as long, and
    whose requests are delayed by up to `latest_s`."""
    order = ORDERS[measured.name.partition("__")[0]]
    admission = {
        "order": order,
        "every": 10,
        "batch_max_tokens": 3072,
        "client_tokens": ADAPTER_TOKENS,
        "charges": "twice" if measured.name in TWICE else "once",
    }
    config: dict[str, Any] = {
        "scheduler": {"name": NAME, **admission},
        "prefill_limit": None,  # S-LoRA has none
        "kv_cache": {"name": "prefix", "reuse": False},
        "executor": {
            "name": NAME,
            "num_pages": POOL_TOKENS,
            "step_time": server.profile.model_dump(mode="json"),
            "scattered_s": server.scattered_s,
            "step_time_factor": steps,
        },
        "overlap": False,
        "block_size": 1,
        "max_num_seqs": 1000,
        "max_num_batched_tokens": 3072,
        "max_model_len": 3072,
    }
    sent = {request.id: request.arrival_time for request in measured.trace}
    result = replay(config, put_off(measured.trace, seed, latest_s), registry=registry())
    works = [
        work(
            one.client,
            sent[one.id],
            one.token_times_s[0],
            one.token_times_s[-1],
            one.prompt_tokens - BEGINNING,
            one.output_tokens,
        )
        for one in result
    ]
    tokens = sum(one.prompt_tokens - BEGINNING + one.output_tokens for one in result)
    return figures_of(works, tokens, max(one.last_token_s for one in works))


def figures_of_measured(run: ServedRun) -> Figures:
    works = [
        work(
            one.client, one.arrival_s, one.first_s, one.last_s, one.prompt_tokens, one.output_tokens
        )
        for one in run.requests
    ]
    return figures_of(
        works, sum(one.prompt_tokens + one.output_tokens for one in run.requests), run.total_s
    )


def work(
    client: str | None,
    sent_s: float,
    first_s: float,
    last_s: float,
    prompt_tokens: int,
    output_tokens: int,
) -> Work:
    return Work(
        client,
        sent_s,
        float(first_s),
        float(last_s),
        INPUT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * output_tokens,
    )


def figures_of(works: Sequence[Work], tokens: int, total_s: float) -> Figures:
    unfairness = float(
        service_difference(service_over_time(works, arena_centres(), WINDOW_S)).mean()
    )
    ttft = float(np.mean([one.first_token_s - one.arrival_s for one in works]))
    e2e = float(np.mean([one.last_token_s - one.arrival_s for one in works]))
    return dict(zip(WITHIN, (unfairness, tokens / total_s, ttft, e2e), strict=True))


def host_factor(run: ServedRun, server: Server) -> float:
    """Return the factor of the host's times with which `run` has its measured throughput: two steps
    of the secant method from 1 and 1.2."""
    target = figures_of_measured(run)["tokens/s"]
    low = 1.0
    high = 1.2
    at_low, at_high = (simulate(run, server.times(factor), 0)["tokens/s"] for factor in (low, high))
    for _ in range(2):
        low, at_low, high = (
            high,
            at_high,
            high + (target - at_high) * (high - low) / (at_high - at_low),
        )
        at_high = simulate(run, server.times(high), 0)["tokens/s"]
    return round(high, 3)


def mean_of(name: str, runs: list[Figures]) -> Figures:
    """Return the mean of each figure, and print how far apart the runs are."""
    spread = "; ".join(
        f"{what} {min(run[what] for run in runs):.4g} to {max(run[what] for run in runs):.4g}"
        for what in WITHIN
    )
    print(f"{name}, {len(runs)} runs: {spread}", flush=True)
    return {what: float(np.mean([run[what] for run in runs])) for what in WITHIN}


def by_fairness(figures: dict[str, Figures]) -> list[str]:
    return sorted(
        (name for name in figures if name.endswith("__real")),
        key=lambda name: figures[name]["service difference"],
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--factor", type=float, help="of the host's times, instead of finding it")
    parser.add_argument(
        "--steps", type=float, default=1.0, help="factor of the device's times, after the fit"
    )
    parser.add_argument(
        "--latest",
        type=float,
        default=LATEST_S,
        metavar="S",
        help="maximum delay of an arrival, in seconds",
    )
    parser.add_argument("--repeats", type=int, default=4, help="runs whose mean is taken")
    parser.add_argument(
        "--runs",
        nargs="+",
        default=list(RUNS),
        metavar="POLICY__WORKLOAD",
        help="which measured runs, by the names of their files",
    )
    parser.add_argument(
        "--fit-on",
        nargs="+",
        default=list(FITTED),
        metavar="POLICY__WORKLOAD",
        help="measured runs to fit on; the factor is of the first",
    )
    parser.add_argument("--profile", type=Path, help="where to write the step times")
    args = parser.parse_args()
    folder = args.traces / "vtc_arena"
    fitted_on, runs = (
        [ServedRun.load(folder / "measured" / f"{name}.jsonl") for name in names]
        for names in (args.fit_on, args.runs)
    )
    fitted = fit_server(single_batches(folder / "cost_profile_a10g_llama7b.json"), fitted_on)
    factor = args.factor if args.factor is not None else host_factor(fitted_on[0], fitted)
    server = fitted.times(factor)
    profile = server.profile
    host = ", ".join(f"{name} {1e3 * getattr(profile, name):.3f} ms" for name in HOST)
    print(
        f"step times: {profile.step_time}, off by {profile.error:.1%} on "
        f"{profile.judged_on}\nhost, times {factor:g}: {host}, "
        f"scattered slots {1e3 * server.scattered_s:.3f} ms"
    )
    for run in runs:
        print(
            f"  {run.name}: answers take {answers_off_by(fitted, run):.1%} more or less than "
            f"fitted, on average"
        )
    if args.profile:
        profile.save(args.profile)
    measured = {run.name: figures_of_measured(run) for run in runs}
    simulated = {
        run.name: mean_of(
            run.name,
            [
                simulate(run, server, seed, steps=args.steps, latest_s=args.latest)
                for seed in range(args.repeats)
            ],
        )
        for run in runs
    }
    held = [
        print_figures(
            f"{name}, {'which was fitted on' if name in args.fit_on else 'predicted'}",
            [
                Figure(what, simulated[name][what], measured[name][what], within)
                for what, within in WITHIN.items()
            ],
        )
        for name in measured
    ]
    close = [
        abs(simulated[name][what] / measured[name][what] - 1.0) <= CLOSE
        for name in measured
        for what in WITHIN
    ]
    print(f"\n{sum(close)} of {len(close)} figures within {CLOSE:.0%}")
    same_order = by_fairness(simulated) == by_fairness(measured)
    print(
        f"\nfrom fair to unfair: simulated {' '.join(by_fairness(simulated))}, measured "
        f"{' '.join(by_fairness(measured))}"
    )
    raise SystemExit(not (all(held) and same_order))


if __name__ == "__main__":
    main()
