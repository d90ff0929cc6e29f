"""Tokens per second of whole workloads on one GPU, as a share of what the memory and the matrix
units allow.

    python -m bench.throughput --workload nano --attention triton
    python -m bench.throughput --workload nano --shape llama-3.2-1b
    python -m bench.throughput --workload 8b-one --checkpoint int4-g128
    python -m bench.throughput --workload nano --param presence_penalty=1.5 --param repetition_penalty=1.05    # beside it without them
    python -m bench.throughput --workload 8b-one 8b-64 8b-256 --engine dovetail dovetail-transformers    # the native model and transformers' code
    python -m bench.throughput --workload moe-one moe-64      # tokens are routed uniformly: routers of random models choose few experts
    python -m bench.throughput --workload nano one eight --engine dovetail nano-vllm vllm transformers --json out.json

Random weights in the model's true shape, bfloat16; one warm-up call, then three timed runs with
fresh token ids each; detokenization on. The floor (`bench/limits.py`) is computed from the shapes,
and the copy bandwidth and product rate measured in the same run. Each engine runs each workload in
a process of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from bench.apart import apart
from bench.engines import ENGINES, Measured, params_of, run_engine, settings_of
from bench.limits import BYTES, Limits, floor_seconds, measure_limits, require_gpu
from bench.shapes import EXPERT_BYTES, QUANTIZED, SHAPES, write_checkpoint
from bench.workloads import WORKLOADS, Workload


def report(
    name: str,
    engine: str,
    work: Workload,
    measured: Measured,
    limits: Limits,
    expert_bytes: float = BYTES,
) -> dict[str, Any]:
    ranks = int(measured.details.get("ranks", 1))  # each moves and computes a share
    floor = (
        floor_seconds(SHAPES[work.shape], work.lens, limits, work.shared_prefix, expert_bytes)
        / ranks
    )
    median = statistics.median(measured.seconds)
    row = {
        "workload": name,
        "shape": work.shape,
        "engine": engine,
        "params": work.params,
        "seconds": measured.seconds,
        "median_s": median,
        "tok_s": work.output_tokens / median,
        "prefill_tok_s": work.prompt_tokens / median,
        "floor_s": floor,
        "share_of_floor": floor / median,
        "start_s": measured.start_s,
        "copy_TB_s": limits.copy_bytes_per_s / 1e12,
        "product_TFLOP_s": limits.flop_per_s / 1e12,
        **measured.details,
    }
    print(
        f"{name:>10} {engine:>10} {row['tok_s']:>9,.0f} tok/s {median:8.3f} s  floor {floor:6.3f} "
        f"s ({100 * row['share_of_floor']:.0f} %)  "
        f"start {measured.start_s:.1f} s  "
        + " ".join(
            f"{k}={_short(v)}"
            for k, v in {**work.params, **measured.details}.items()
            if isinstance(v, int | float)
        ),
        flush=True,
    )
    return row


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", nargs="+", default=["nano"], choices=WORKLOADS)
    parser.add_argument(
        "--shape", choices=SHAPES, help="shape of the model, instead of the workload's"
    )
    parser.add_argument(
        "--checkpoint", choices=QUANTIZED, help="format of weights, instead of bfloat16"
    )
    parser.add_argument("--engine", nargs="+", default=["dovetail"], choices=ENGINES)
    parser.add_argument("--attention", default="auto")
    parser.add_argument(
        "--param",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a sampling parameter; each workload runs without them, too",
    )
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="further keys of engine.yaml"
    )
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    require_gpu()
    overrides: dict[str, Any] = {"attention": args.attention, **settings_of(args.set)}
    rows = []
    limits = {}
    params = params_of(args.param)
    for name in args.workload:
        work = WORKLOADS[name] if args.shape is None else replace(WORKLOADS[name], shape=args.shape)
        ways = [work, replace(work, params=params)] if params else [work]
        if work.shape not in limits:
            limits[work.shape] = apart(measure_limits, SHAPES[work.shape])
        with tempfile.TemporaryDirectory() as directory:
            write_checkpoint(SHAPES[work.shape], Path(directory), args.checkpoint)
            for engine, way in product(args.engine, ways):
                measured = apart(run_engine, engine, way, Path(directory), overrides)
                if measured is not None:
                    rows.append(
                        report(
                            name,
                            engine,
                            way,
                            measured,
                            limits[work.shape],
                            EXPERT_BYTES.get(args.checkpoint, BYTES),
                        )
                    )
        if args.json:
            Path(args.json).write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
