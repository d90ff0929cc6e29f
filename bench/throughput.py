"""Tokens per second of whole workloads on one GPU, as a share of what the memory and the matrix units allow.

    python -m bench.throughput --workload nano --attention triton
    python -m bench.throughput --workload nano one eight --engine dovetail nano-vllm --json out.json

Random weights in the model's true shape, bfloat16; one warm-up call, then three timed runs with fresh token ids each; detokenization on. The floor
(`bench/limits.py`) is computed from the shapes, and the copy bandwidth and product rate measured in the same run.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.limits import Limits, floor_seconds, measure_limits
from bench.shapes import SHAPES, write_checkpoint
from bench.workloads import WORKLOADS, Workload

RUNS = 3


@dataclass
class Measured:
    seconds: list[float]
    start_s: float  # until the engine was ready
    details: dict[str, Any] = field(default_factory=dict)


def run_dovetail(work: Workload, directory: Path, overrides: dict[str, Any]) -> Measured:
    from dovetail import LLM, SamplingParams

    begun = time.perf_counter()
    settings: dict[str, Any] = {"load_format": "dummy", "dtype": "bfloat16", "max_num_seqs": work.max_num_seqs or len(work.lens)}
    settings["max_model_len"] = max(prompt + out for prompt, out in work.lens)
    with LLM(directory, **{**settings, **overrides}) as llm:
        started = time.perf_counter() - begun
        params = [SamplingParams(temperature=work.temperature, ignore_eos=True, max_tokens=out) for _, out in work.lens]
        llm.generate(work.prompts(seed=100), params, use_tqdm=False)
        times, before = [], llm.engine.stats()
        for run in range(RUNS):
            prompts = work.prompts(seed=run)
            torch.cuda.synchronize()
            begun = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            times.append(time.perf_counter() - begun)
            produced = sum(len(output.outputs[0].token_ids) for output in outputs)
            if produced != work.output_tokens:
                raise SystemExit(f"{produced} tokens were generated, not {work.output_tokens}")
        stats = llm.engine.stats()
        steps = stats.steps - before.steps
        details = {
            **llm.engine.capacity.details,
            "steps": steps // RUNS,
            "device_ms_a_step": 1e3 * (stats.device_s - before.device_s) / steps,
            "core_ms_a_step": 1e3 * (stats.core_s - before.core_s) / steps,
            "wall_ms_a_step": 1e3 * sum(times) / steps,
            "preemptions": stats.preemptions - before.preemptions,
        }
    return Measured(times, started, details)


def run_nano_vllm(work: Workload, directory: Path, overrides: dict[str, Any]) -> Measured:
    from nanovllm import LLM, SamplingParams

    begun = time.perf_counter()
    longest = max(prompt + out for prompt, out in work.lens)
    llm = LLM(str(directory), enforce_eager=False, max_model_len=longest, max_num_seqs=work.max_num_seqs or len(work.lens))
    started = time.perf_counter() - begun
    params = [SamplingParams(temperature=work.temperature, ignore_eos=True, max_tokens=out) for _, out in work.lens]
    llm.generate(work.prompts(seed=100), params, use_tqdm=False)
    times = []
    for run in range(RUNS):
        prompts = work.prompts(seed=run)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        times.append(time.perf_counter() - begun)
    llm.exit()
    return Measured(times, started)


ENGINES = {"dovetail": run_dovetail, "nano-vllm": run_nano_vllm}


def report(name: str, engine: str, work: Workload, measured: Measured, limits: Limits) -> dict[str, Any]:
    floor = floor_seconds(SHAPES[work.shape], work.lens, limits, work.shared_prefix)
    median = statistics.median(measured.seconds)
    row = {
        "workload": name,
        "engine": engine,
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
        f"{name:>10} {engine:>10} {row['tok_s']:>9,.0f} tok/s {median:8.3f} s  floor {floor:6.3f} s ({100 * row['share_of_floor']:.0f} %)  "
        f"start {measured.start_s:.1f} s  " + " ".join(f"{k}={v:.3g}" for k, v in measured.details.items() if isinstance(v, int | float)),
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", default=["nano"], choices=WORKLOADS)
    parser.add_argument("--engine", nargs="+", default=["dovetail"], choices=ENGINES)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further keys of engine.yaml")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    overrides: dict[str, Any] = {"attention": args.attention}
    overrides |= {key: json.loads(value) if value[:1] in "0123456789tfn{[" else value for key, value in (item.split("=", 1) for item in args.set)}
    rows, limits = [], {}
    for name in args.workload:
        work = WORKLOADS[name]
        if work.shape not in limits:
            limits[work.shape] = measure_limits(SHAPES[work.shape])
        with tempfile.TemporaryDirectory() as directory:
            write_checkpoint(SHAPES[work.shape], Path(directory))
            for engine in args.engine:
                rows.append(report(name, engine, work, ENGINES[engine](work, Path(directory), overrides), limits[work.shape]))
                gc.collect()
                torch.cuda.empty_cache()
        if args.json:
            Path(args.json).write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
