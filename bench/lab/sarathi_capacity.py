"""Chunked prefills against prefills first, by capacity: the comparison of Sarathi-Serve (Agrawal et
al., OSDI '24, arXiv:2403.02310, section 5.2).

    python -m bench.lab.sarathi_capacity --traces DIR               # ten minutes
    python -m bench.lab.sarathi_capacity --traces DIR --chunk 2048 --tbt 0.5    # the relaxed objective

The capacity is the highest Poisson rate at which 2,048 requests of ShareGPT's lengths have a P99 of
all times between tokens (TBT) within `--tbt` and a median scheduling delay within 2 s. Overlap off,
with 2 ms of the core's own time a step, prefix reuse off, blocks of 16, 128 sequences.

Step times are those of Mistral-7B on one A100 of 80 GB, from its data sheet, not from a
measurement: 14.5 GB of weights at 1.7 TB/s (83 % of the peak) a step; 14.5 GFLOP a token at 188
TFLOP/s (60 %); 131 kB of K and V a token of context at 1.7 TB/s; 0.52 MFLOP for each pair of a
query and a key, 32 layers of 4,096, at 188 TFLOP/s. The pool holds 416,000 tokens: 54.5 of the 80
GB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.lab.checks import arguments
from dovetail_lab.capacity import find_capacity
from dovetail_lab.records import RunResult
from dovetail_lab.simulate import replay
from dovetail_lab.slo import Objective, parse_slo
from dovetail_lab.traces import Trace, scale_rate
from dovetail_lab.workloads import WorkloadOptions, load_workload

REQUESTS = 2048
STEP_TIME = {
    "kind": "linear",
    "base_s": 8.5e-3,
    "per_token_s": 7.7e-5,
    "per_context_s": 7.7e-8,
    "per_pair_s": 2.8e-9,
}
EXPECTED = (2.0, 3.0)  # times


def engine(scheduler: dict[str, Any]) -> dict[str, Any]:
    return {
        "scheduler": scheduler,
        "prefill_limit": None,  # the paper's systems have none
        "kv_cache": {"name": "prefix", "reuse": False},
        "executor": {
            "name": "simulated",
            "num_pages": 26_000,
            "core_s": 0.002,
            "step_time": STEP_TIME,
        },
        "overlap": False,
        "block_size": 16,
        "max_num_seqs": 128,
        "max_num_batched_tokens": 8192,
        "max_model_len": 8192,
    }


def runner(
    scheduler: dict[str, Any], trace: Trace, objectives: tuple[Objective, ...]
) -> Callable[[float], list[RunResult]]:
    def run(rate: float) -> list[RunResult]:
        result = replay(engine(scheduler), scale_rate(trace, rate))
        values = ", ".join(
            f"{objective.name} {objective.judge([result]).value:.3g} s" for objective in objectives
        )
        print(f"  {scheduler['name']:14} {rate:6.3f}/s: {values}", flush=True)
        return [result]

    return run


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--chunk", type=int, default=512, help="tokens of a step with chunked prefills"
    )
    parser.add_argument("--tbt", type=float, default=0.1, help="seconds between tokens, P99")
    parser.add_argument("--tolerance", type=float, default=0.1, help="of a capacity, relative")
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals")
    args = parser.parse_args()
    path = args.traces / "sharegpt" / "sharegpt_8k_filtered_stats_llama2_tokenizer.csv"
    trace = load_workload(
        str(path), WorkloadOptions(arrivals="poisson(1)", slice=f"0:{REQUESTS}", seed=args.seed)
    )
    objectives = parse_slo(f"itl_p99<{args.tbt},queue_p50<2")
    found = {}
    for name, scheduler in (
        ("chunked", {"name": "sarathi", "chunk_tokens": args.chunk}),
        ("prefills first", {"name": "prefill_first"}),
    ):
        capacity = find_capacity(
            runner(scheduler, trace, objectives), objectives, tolerance=args.tolerance, start=2.0
        )
        if capacity.scale is None:
            raise SystemExit(f"{name}: no rate meets {', '.join(map(str, objectives))}")
        found[name] = capacity.scale
        print(
            f"{name}: {capacity.scale:.3g} requests/s, to "
            f"{args.tolerance:.0%}{'' if capacity.monotone else '; a higher rate passed, too'}"
        )
    ratio = found["chunked"] / found["prefills first"]
    print(
        f"\nchunked over prefills first: {ratio:.2f} times; the paper: {EXPECTED[0]:g} to "
        f"{EXPECTED[1]:g}"
    )
    raise SystemExit(not EXPECTED[0] <= ratio <= EXPECTED[1])


if __name__ == "__main__":
    main()
