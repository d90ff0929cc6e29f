"""Published scheduling results, repeated in simulation: what was published beside what is found, with
a 95 % interval over seeds.

    python -m bench.lab.paper_results clairvoyant      # SJF for serial servers (arXiv:2606.07248, 2026)
    python -m bench.lab.paper_results rpm              # limits per minute (VTC, OSDI '24)
    python -m bench.lab.paper_results klpm             # k-LPM (NeurIPS '25, arXiv:2502.04677)

Each seed is other traffic, drawn from the workload `paper:NAME`, which all policies get alike. A
change is that of the geometric mean over seeds, its interval Student's. A published figure *holds*
if the change has its sign and the interval excludes zero; `as much` if the interval also holds the
published figure.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.lab.klpm_scheduling import registry
from dovetail_lab.records import RequestRecord
from dovetail_lab.simulate import replay
from dovetail_lab.statistics import half_of
from dovetail_lab.workloads import WorkloadOptions, load_workload

Runs = Mapping[str, Sequence[RequestRecord]]  # policy -> the requests of its run
SERIAL = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 2048,
    "max_model_len": 4096,
    "prefill_limit": None,
    "executor": {
        "name": "simulated",
        "num_pages": 512,
        "step_time": {"kind": "linear", "base_s": 0.1},
    },
}
A10G = {
    "max_num_seqs": 256,
    "max_num_batched_tokens": 3072,
    "max_model_len": 3072,
    "prefill_limit": None,
    "block_size": 1,
    "kv_cache": {"name": "prefix", "reuse": False},
    "overlap": False,
    "executor": {"name": "simulated", "step_time": "a10g-llama-2-7b"},
}
SHARED = {
    "max_num_seqs": 128,
    "max_num_batched_tokens": 2048,
    "max_model_len": 8192,
    "executor": {
        "name": "simulated",
        "step_time": "rtxpro6000-llama-3.1-8b",
        "num_pages": 4000,
    },
}


@dataclass(frozen=True, slots=True)
class Claim:
    """A published change from one policy to another of `figure`, a number per run; None: published in
    words, as less."""

    text: str
    before: str
    after: str
    figure: Callable[[Sequence[RequestRecord]], float]
    published: float | None


@dataclass(frozen=True, slots=True)
class Study:
    workload: str
    engine: Mapping[str, Any]
    policies: Mapping[str, Any]  # name -> scheduler
    claims: tuple[Claim, ...]
    seeds: int
    requests: int | None = None


def latency(of: str, q: float, client: str | None = None) -> Callable[..., float]:
    """Return a function for a percentile of TTFT or E2E, of one client's requests."""

    def figure(records: Sequence[RequestRecord]) -> float:
        at = 0 if of == "ttft" else -1
        return float(
            np.percentile(
                [
                    one.token_times_s[at] - one.arrival_s
                    for one in records
                    if one.completed and client in (None, one.client)
                ],
                q,
            )
        )

    return figure


def tokens_per_s(records: Sequence[RequestRecord]) -> float:
    """Return the tokens of completed requests per second, until the last of them ends."""
    done = [one for one in records if one.completed]
    return sum(one.prompt_tokens + one.output_tokens for one in done) / max(
        float(one.token_times_s[-1]) for one in done
    )


def serial(text: str, of: str, q: float, client: str, published: float) -> Claim:
    return Claim(text, "fcfs", "sjf", latency(of, q, client), published)


STUDIES: dict[str, tuple[Study, ...]] = {
    "clairvoyant": (
        Study(
            "paper:serial-burst",
            SERIAL,
            {"fcfs": "fcfs", "sjf": "sjf"},
            (
                serial("short requests' median, burst (RTX 4090)", "e2e", 50, "short", -0.699),
                serial("short requests' P95, burst", "e2e", 95, "short", -0.677),
                serial("long requests' median, burst", "e2e", 50, "long", 0.214),
            ),
            seeds=6,
        ),
        Study(
            "paper:serial-poisson",
            SERIAL,
            {"fcfs": "fcfs", "sjf": "sjf"},
            (
                serial("short requests' median, 74 % busy", "e2e", 50, "short", -0.385),
                serial("short requests' P95, 74 % busy", "e2e", 95, "short", -0.663),
                serial("long requests' P95, 74 % busy", "e2e", 95, "long", 0.532),
            ),
            seeds=5,
            requests=300,
        ),
    ),
    "rpm": (
        Study(
            "paper:arena-clients",
            A10G,
            {
                "vtc": {"name": "lightllm", "order": "vtc", "batch_max_tokens": 3072},
                **{
                    f"rpm {limit}": {"name": "rpm", "limit": limit} for limit in (5, 10, 15, 20, 30)
                },
            },
            tuple(
                Claim(
                    f"throughput of {limit} a minute instead of VTC",
                    "vtc",
                    f"rpm {limit}",
                    tokens_per_s,
                    published,
                )
                for limit, published in (
                    (5, -0.564),
                    (10, -0.317),
                    (15, -0.196),
                    (20, -0.109),
                    (30, -0.041),
                )
            ),
            seeds=3,
            requests=300,
        ),
    ),
    "klpm": (
        Study(
            "paper:shuffled-queue",
            SHARED,
            {
                "fcfs": "fcfs",
                "lpm": {"name": "lpm", "patience_s": 1e6},
                "k-lpm": {"name": "k-lpm", "k": 2},
            },
            (
                Claim("P99 TTFT of k-LPM, k = 2", "fcfs", "k-lpm", latency("ttft", 99), None),
                Claim("P99 TTFT of k-LPM, k = 2", "lpm", "k-lpm", latency("ttft", 99), None),
                Claim("mean of the lower half of TTFT", "lpm", "k-lpm", latency("ttft", 50), None),
            ),
            seeds=3,
        ),
    ),
}


def runs_of(study: Study, seed: int, scale: float | None) -> Runs:
    options = WorkloadOptions(
        seed=seed,
        scale_rate=scale,
        slice=None if study.requests is None else f"0:{study.requests}",
    )
    trace = load_workload(study.workload, options)
    return {
        name: replay(
            {**study.engine, "scheduler": scheduler}, trace, seed=seed, registry=registry()
        ).requests
        for name, scheduler in study.policies.items()
    }


def verdict(changes: Sequence[float], published: float | None) -> str:
    """Return the change with its interval and whether it is what was published, from the logarithms
    of a seed's ratios."""
    mean = float(np.mean(changes))
    half = half_of(float(np.std(changes, ddof=1)), len(changes), 0.95)
    low, high = math.expm1(mean - half), math.expm1(mean + half)
    sign = -1.0 if published is None else math.copysign(1.0, published)
    if low <= 0.0 <= high:
        said = "no measurable difference"
    elif math.copysign(1.0, mean) != sign:
        said = "the opposite"
    elif published is None:
        said = "holds"
    else:
        said = "holds, as much" if low <= published <= high else "holds, not as much"
        if abs(math.expm1(mean)) > abs(published) and not low <= published <= high:
            said = "holds, more"
    return f"{math.expm1(mean):+7.1%} [{low:+.1%}, {high:+.1%}]  {said}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", choices=sorted(STUDIES))
    parser.add_argument("--seeds", type=int, help="instead of the study's")
    parser.add_argument("--scale-rate", type=float, help="of the arrivals")
    args = parser.parse_args()
    for study in (study for name in args.results for study in STUDIES[name]):
        seeds = args.seeds or study.seeds
        runs = [runs_of(study, seed, args.scale_rate) for seed in range(seeds)]
        print(f"\n{study.workload}, {seeds} seeds")
        print(f"  {'':44}{'published':>10}   found")
        for claim in study.claims:
            changes = [
                math.log(claim.figure(run[claim.after]) / claim.figure(run[claim.before]))
                for run in runs
            ]
            published = "less" if claim.published is None else f"{claim.published:+.1%}"
            what = f"{claim.text}, {claim.before} to {claim.after}"
            print(f"  {what:60}{published:>8}  {verdict(changes, claim.published)}", flush=True)


if __name__ == "__main__":
    main()
