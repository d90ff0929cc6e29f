"""Routers on the conversation trace of Mooncake (Qin et al., FAST '25): the share of the prompts'
tokens that the replicas' prefix caches hold, and how long first tokens take.

    python -m bench.lab.routing --traces DIR [--replicas 4] [--blocks 1500] [--requests 12031]

DIR holds `mooncake/conversation_trace.jsonl`. Each replica is an H200 with Qwen3-8B, whose step
times were measured, and `--blocks` blocks of 512 tokens, about what its memory holds. The last line
is one engine with the memory of all, whose steps take a tenth of the time: it shows what a prefix
cache finds if nothing has to be routed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from dovetail_lab.records import RequestRecord, RunResult
from dovetail_lab.replicas import replay_replicas
from dovetail_lab.routers import parse_router
from dovetail_lab.simulate import replay
from dovetail_lab.workloads import WorkloadOptions, load_workload

BLOCK_TOKENS = 512  # the trace's
QUICK = {
    "kind": "linear",
    "base_s": 0.001,
    "per_token_s": 2.5e-6,
}  # some ten times as fast as one H200


def engine(blocks: int, step_time: object) -> dict[str, object]:
    return {
        "scheduler": "fcfs",
        "block_size": BLOCK_TOKENS,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "max_model_len": 131_072,
        "executor": {"name": "simulated", "num_pages": blocks, "step_time": step_time},
    }


def told(name: str, records: Iterable[RequestRecord]) -> str:
    done = [record for record in records if record.completed]
    ttft = np.array([record.token_times_s[0] - record.arrival_s for record in done])
    share = sum(record.cached_tokens for record in done) / sum(
        record.prompt_tokens for record in done
    )
    return (
        f"{name:32} {share:8.1%} {ttft.mean():9.3f} {np.percentile(ttft, 99):9.2f}   "
        f"{len(done):,} completed"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=1500)
    parser.add_argument("--requests", type=int, default=12_031)
    args = parser.parse_args()
    trace = load_workload(
        str(args.traces / "mooncake" / "conversation_trace.jsonl"),
        WorkloadOptions(slice=f"0:{args.requests}"),
    )
    print(
        f"{'router':32} {'cached':>8} {'mean TTFT':>9} {'p99 TTFT':>9}   of {len(trace):,} "
        f"requests, {args.replicas} x {args.blocks} blocks"
    )
    aware = f"prefix_aware(blocks={args.blocks}, block_tokens={BLOCK_TOKENS}"
    for router in ("round_robin", "least_tokens", "vllm", f"{aware})", f"{aware}, least_match=0)"):
        found: RunResult = replay_replicas(
            engine(args.blocks, "h200-qwen3-8b"), trace, args.replicas, parse_router(router)
        )
        print(
            told(
                router.partition("(")[0] + (" of any match" if "least_match" in router else ""),
                found,
            ),
            flush=True,
        )
    print(
        told(
            "one engine with all the memory",
            replay(engine(args.blocks * args.replicas, QUICK), trace),
        )
    )


if __name__ == "__main__":
    main()
