"""Does what an engine does besides plain decoding change the ranking of policies? One study for
each feature: the same traffic with and without it, under the same policies.

    python -m bench.lab.features                    # all: a minute or two on an idle core
    python -m bench.lab.features --only adapters

Two policies count as equal if their means differ by less than 3 %: one seed can't tell more.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from dovetail_lab.metrics import e2e_s, ttft_s
from dovetail_lab.simulate import replay
from dovetail_lab.workloads import load_workload

Config = Mapping[str, Any]
EQUAL = 0.03
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

    def run(self, policy: str) -> tuple[float, float]:
        """Return mean TTFT and E2E in seconds."""
        config = {
            "max_num_seqs": 64,
            "max_num_batched_tokens": 2048,
            "max_model_len": 16_384,
            "scheduler": POLICIES[policy],
            "executor": {"name": "simulated", **self.executor},
            **self.settings,
        }
        result = replay(config, load_workload(self.workload))
        done = [record for record in result if record.completed]
        if len(done) < len(result):
            raise SystemExit(f"{self.name}, {policy}: {len(result) - len(done)} requests failed")
        return tuple(  # type: ignore[return-value]
            float(np.mean([of_record(record) for record in done])) for of_record in (ttft_s, e2e_s)
        )


@dataclass(frozen=True, slots=True)
class Study:
    """Cases that differ in one feature. `by_ttft`: policies are ranked by mean TTFT, not by E2E."""

    policies: tuple[str, ...]
    cases: tuple[Case, ...]
    by_ttft: bool = False


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
        by_ttft=True,
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


def ranking(values: Mapping[str, float]) -> str:
    """Return the policies, best first; `=` between two that can't be told apart."""
    best = sorted(values, key=values.__getitem__)
    signs = ("=" if values[b] < (1 + EQUAL) * values[a] else "<" for a, b in pairwise(best))
    return " ".join(
        [best[0], *(f"{sign} {name}" for sign, name in zip(signs, best[1:], strict=True))]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=STUDIES, help="one feature")
    args = parser.parse_args()
    for name, study in STUDIES.items():
        if args.only not in (None, name):
            continue
        print(f"{name}: mean {'TTFT' if study.by_ttft else 'E2E'}")
        for case in study.cases:
            means = {policy: case.run(policy) for policy in study.policies}
            values = {
                policy: ttft if study.by_ttft else e2e for policy, (ttft, e2e) in means.items()
            }
            figures = ", ".join(f"{policy} {value:.3f} s" for policy, value in values.items())
            print(f"  {case.name:34}{figures}\n  {'':34}{ranking(values)}", flush=True)


if __name__ == "__main__":
    main()
