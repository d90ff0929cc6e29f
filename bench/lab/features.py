"""Does what an engine does besides plain decoding change the ranking of policies? One study for
each feature: the same traffic with and without it, under the same policies.

    python -m bench.lab.features                    # all: ten minutes of an idle core
    python -m bench.lab.features --only adapters

Neighbours in a ranking have the 95 % interval of their difference over the seeds, and `~` stands
between two that the seeds can't tell apart.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

import numpy as np

from dovetail import EngineConfig
from dovetail_lab.compare import compare
from dovetail_lab.metrics import measure
from dovetail_lab.planned_runs import PlannedRun, Workers, unchanged
from dovetail_lab.records import RunResult
from dovetail_lab.verdict import LATENCIES, change_rows
from dovetail_lab.workload_options import WorkloadOptions

Config = Mapping[str, Any]
Runs = Mapping[str, Sequence[RunResult]]  # of a policy, by seed
SEEDS = 5
POLICIES: Mapping[str, Any] = {
    "fcfs": "fcfs",
    "srpt": "srpt",
    "lpm": "lpm",
    "sarathi": {"name": "sarathi", "chunk_tokens": 256},
    "prefill_first": "prefill_first",
}
SIZES = {
    "num_hidden_layers": 36,
    "hidden_size": 2560,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "vocab_size": 151_936,
}
WINDOWED = {
    **SIZES,
    "model_type": "gemma3_text",
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}
RECURRENT = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 32,
    "hidden_size": 2560,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 9216,
    "vocab_size": 248_320,
}
# Qwen3-30B-A3B, and a model as deep that computes as much for a token
DENSE = {
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "vocab_size": 151_936,
}
MIXTURE = {
    **DENSE,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One load: what the executor simulates, other settings, and requests."""

    name: str
    workload: str
    executor: Config
    settings: Config = field(default_factory=dict)

    def planned(self, policy: str, seed: int) -> PlannedRun:
        """Return the run of a policy."""
        config = {
            "max_num_seqs": 64,
            "max_num_batched_tokens": 2048,
            "max_model_len": 16_384,
            "scheduler": POLICIES[policy],
            "executor": {"name": "simulated", **self.executor},
            **self.settings,
        }
        return PlannedRun(EngineConfig.load(config), self.workload, WorkloadOptions(seed=seed))

    def run(self, policies: Sequence[str], seeds: int, workers: Workers) -> Runs:
        """Return the runs of all policies. Exits if a request failed."""
        planned = [self.planned(policy, seed) for policy in policies for seed in range(seeds)]
        made = workers.run_all(planned, unchanged, self.name)
        runs = {policy: list(islice(made, seeds)) for policy in policies}
        for policy, own in runs.items():
            if failed := sum(not record.completed for result in own for record in result):
                raise SystemExit(f"{self.name}, {policy}: {failed} requests failed")
        return runs


@dataclass(frozen=True, slots=True)
class Study:
    """Cases that differ in one feature. Policies are ranked by the mean of `latency`."""

    policies: tuple[str, ...]
    cases: tuple[Case, ...]
    latency: str = "e2e"


def roofline(model: Config, **options: Any) -> Config:
    return {
        "step_time": {"kind": "roofline", "device": "h100-80gb", "model": dict(model)},
        **options,
    }


def profile(name: str, **options: Any) -> Config:
    return {"step_time": name, **options}


CHUNKED = ("fcfs", "sarathi", "prefill_first")
LONG = "requests=120 arrivals=poisson(10) prompt=uniform(500, 3000) output=uniform(10, 150)"
CHATS = "requests=120 arrivals=poisson(8) prompt=uniform(500, 5000) output=uniform(20, 400)"
ADAPTED = (
    "requests=300 arrivals=poisson(60) prompt=uniform(50, 600) output=uniform(5, 300) "
    "adapters=zipf(24, 1)"
)
TURNS = (
    "requests=40 arrivals=poisson(20) prompt=uniform(500, 2000) output=uniform(10, 60) turns=4 "
    "think=1"
)
POOLED = "requests=150 arrivals=poisson(25) prompt=uniform(200, 2000) output=uniform(10, 150)"
DRAFTED = "requests=150 arrivals=poisson(16) prompt=uniform(100, 1500) output=uniform(20, 300)"
IMAGES = "requests=150 arrivals=poisson(10) prompt=uniform(100, 800) output=uniform(20, 200)"
RULED = "requests=200 arrivals=poisson(40) prompt=uniform(50, 800) output=uniform(20, 200)"
SLOTS = {"adapters": {"slots": 4}}
SPECULATING = {"speculation": {"drafter": "simulated", "max_drafts": 4}}
CACHED = {"media": {"cache_rows": 16_384, "step_rows": 2048}}
FEW = {"max_num_seqs": 16}
LINES = "h100-qwen3-8b-lines"

STUDIES: Mapping[str, Study] = {
    "mixtures": Study(
        CHUNKED[1:],
        (Case("dense", LONG, roofline(DENSE)), Case("128 experts", LONG, roofline(MIXTURE))),
    ),
    "windows": Study(
        CHUNKED,
        (
            Case("none", CHATS, roofline(SIZES, num_pages=2400)),
            Case("512 tokens, 5 of 6 layers", CHATS, roofline(WINDOWED, num_pages=6 * 2400)),
        ),
        latency="ttft",
    ),
    "recurrent layers": Study(
        ("fcfs", "lpm", "srpt"),
        (
            Case("none", TURNS, roofline(SIZES, num_pages=3000), FEW),
            Case("24 of 32", TURNS, roofline(RECURRENT, num_pages=3000), FEW),
        ),
    ),
    "drafts": Study(
        CHUNKED,
        (
            Case("none", DRAFTED, profile(LINES)),
            Case("accepted 0.8 each", DRAFTED, profile(LINES, acceptance=[0.8]), SPECULATING),
            Case(
                "0.8, 0.3, 0.1 by place",
                DRAFTED,
                profile(LINES, acceptance=[0.8, 0.3, 0.1]),
                SPECULATING,
            ),
        ),
    ),
    "adapters": Study(
        ("fcfs", "srpt"),
        tuple(
            Case(
                f"24 in 4 slots, {1000 * seconds:.0f} ms a load",
                ADAPTED,
                profile("h200-qwen3-0.6b", adapter_load_s=seconds, adapter_read_s=0.0),
                SLOTS,
            )
            for seconds in (0.0, 0.02, 0.1)
        ),
    ),
    "pooling": Study(
        CHUNKED,
        (
            Case("none", POOLED, roofline(SIZES)),
            Case("80 % of requests", f"{POOLED} pooling_share=0.8", roofline(SIZES)),
        ),
    ),
    "grammars": Study(
        CHUNKED,
        (
            Case("none", RULED, profile("h200-qwen3-0.6b")),
            Case("all requests", f"{RULED} grammar_share=1", profile("h200-qwen3-0.6b")),
        ),
    ),
    "images": Study(
        CHUNKED,
        (
            Case("none", IMAGES, profile("h200-qwen3-8b"), CACHED),
            Case("half of requests", f"{IMAGES} image_share=0.5", profile("h200-qwen3-8b"), CACHED),
        ),
    ),
    "tiers": Study(
        ("fcfs", "lpm", "srpt"),
        (
            Case("none", TURNS, roofline(SIZES, num_pages=1500), FEW),
            Case(
                "16 GiB of host memory at 50 GB/s",
                TURNS,
                roofline(SIZES, num_pages=1500, transfer_gbps=50.0),
                {**FEW, "kv_host_memory": "16GiB"},
            ),
        ),
    ),
}


def ranking(runs: Runs, latency: str) -> str:
    """Return the policies with their means over all seeds, best first, and between each two
    neighbours by how much the second is worse."""
    means = {
        policy: float(np.mean([measure(run).latencies[latency].mean for run in own]))
        for policy, own in runs.items()
    }
    best = sorted(means, key=means.__getitem__)
    said = [f"{best[0]} {means[best[0]]:.3f} s"]
    for first, second in pairwise(best):
        found = compare({name: runs[name] for name in (first, second)})
        line = found.versus[0].line(latency, "mean")
        [(_, (*_, change, interval))] = change_rows([line])
        sign = "<" if line.measurable else "~"
        said.append(f"{sign} {second} {means[second]:.3f} s, {change} {interval}")
    return " ".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=STUDIES, help="one feature")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="runs, with traffic of their own")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    args = parser.parse_args()
    with Workers(args.jobs) as workers:
        for name, study in STUDIES.items():
            if args.only not in (None, name):
                continue
            print(f"{name}: mean {LATENCIES[study.latency]}, {args.seeds} seeds")
            for case in study.cases:
                runs = case.run(study.policies, args.seeds, workers)
                print(f"  {case.name:34}{ranking(runs, study.latency)}", flush=True)


if __name__ == "__main__":
    main()
