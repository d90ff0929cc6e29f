"""Tokens per second with LoRA adapters beside those without, on one GPU.

    python -m bench.adapters                                           # nano on qwen3-0.6b, 8 adapters of rank 16 on all projections
    python -m bench.adapters --shape qwen3-8b --checkpoint fp8
    python -m bench.adapters --adapters 64 --rank 32 --ways off all

Ways: `off`, an engine without slots; `unused`, slots that no request uses, which should cost
nothing; `one`, all requests use the same; `all`, each another in turn. Random weights in the
model's true shape; one warm-up call, then three timed runs with fresh token ids each. Each way runs
in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.apart import apart
from bench.engines import settings_of, timed, warm_up
from bench.limits import require_gpu
from bench.shapes import QUANTIZED, SHAPES, write_checkpoint
from bench.workloads import WORKLOADS, Workload

WAYS = ("off", "unused", "one", "all")


def write_adapter(
    directory: Path, modules: dict[str, tuple[int, int]], rank: int, seed: int
) -> None:
    """Random numbers in PEFT's format; `modules`: (in, out) features of each."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (inputs, outputs) in modules.items():
        for which, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            tensors[f"base_model.model.{name}.lora_{which}.weight"] = (
                torch.randn(shape, generator=generator) * 0.02
            ).bfloat16()
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({name.rpartition(".")[2] for name in modules}),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))


def measured(
    way: str, work: Workload, directory: Path, count: int, rank: int, overrides: dict[str, Any]
) -> dict[str, Any]:
    """Run the workload one way, and return what `bench.adapters` prints of it."""
    from dovetail import LLM, LoRARequest, SamplingParams

    settings: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_num_seqs": work.seqs,
        "max_model_len": work.longest,
        **overrides,
    }
    if way != "off":
        settings["adapters"] = {"slots": count, "max_rank": rank}
    begun = time.perf_counter()
    with LLM(directory, **settings) as llm:
        started = time.perf_counter() - begun
        used: list[Any] = [None]
        if way in ("one", "all"):
            assert llm.engine.capacity.adapters is not None
            used = []
            for index in range(count if way == "all" else 1):
                write_adapter(
                    directory / f"adapter-{index}",
                    dict(llm.engine.capacity.adapters.modules),
                    rank,
                    index,
                )
                used.append(
                    LoRARequest(f"adapter-{index}", index + 1, str(directory / f"adapter-{index}"))
                )
        params = [
            SamplingParams(temperature=work.temperature, ignore_eos=True, max_tokens=out)
            for _, out in work.lens
        ]
        requests = [used[index % len(used)] for index in range(len(params))]

        def generate(prompts: list[list[int]]) -> int:
            given = {} if way == "off" else {"lora_request": requests}
            outputs = llm.generate(prompts, params, use_tqdm=False, **given)
            return sum(len(output.outputs[0].token_ids) for output in outputs)

        warm_up(work, generate)
        before = llm.engine.stats()
        seconds, power = timed(work, generate)
        stats = llm.engine.stats()
        details = llm.engine.capacity.details
    return {
        "way": way,
        "tok_s": work.output_tokens / statistics.median(seconds),
        "seconds": seconds,
        "start_s": started,
        "steps": (stats.steps - before.steps) // work.runs,
        "device_ms_a_step": 1e3 * (stats.device_s - before.device_s) / (stats.steps - before.steps),
        "device": details["device"],
        "adapters": details.get("adapters", "none"),
        "kv_pool": details["kv_pool"],
        **power,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", default="nano", choices=WORKLOADS)
    parser.add_argument(
        "--shape", choices=SHAPES, help="shape of the model, instead of the workload's"
    )
    parser.add_argument(
        "--checkpoint", choices=QUANTIZED, help="format of weights, instead of bfloat16"
    )
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="further keys of engine.yaml"
    )
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    require_gpu()
    work = (
        WORKLOADS[args.workload]
        if args.shape is None
        else replace(WORKLOADS[args.workload], shape=args.shape)
    )
    rows: list[dict[str, Any]] = []
    for way in args.ways:
        with tempfile.TemporaryDirectory() as directory:
            write_checkpoint(SHAPES[work.shape], Path(directory), args.checkpoint)
            row = apart(
                measured,
                way,
                work,
                Path(directory),
                args.adapters,
                args.rank,
                settings_of(args.set),
            )
        rows.append(row)
        share = (
            ""
            if len(rows) == 1
            else f" ({100 * row['tok_s'] / rows[0]['tok_s']:.1f} % of {rows[0]['way']})"
        )
        print(
            f"{work.shape} {args.workload} {way:>6}: {row['tok_s']:>9,.0f} tok/s{share}, "
            f"{row['device_ms_a_step']:.3f} ms a step on the device, "
            f"start {row['start_s']:.1f} s, adapters {row['adapters']}, KV pool {row['kv_pool']}",
            flush=True,
        )
        if args.json:
            Path(args.json).write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
