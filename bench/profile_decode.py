"""Profiles a decode step on a GPU by kernel, or a step with a prompt.

python -m bench.profile_decode --rows 1 8 256 --context 800 python -m bench.profile_decode --shape
qwen3-next --layers 8 --checkpoint fp8 --rows 1 --prompts 8192
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from bench.engines import settings_of
from bench.limits import require_gpu
from bench.routing import uniform_routing
from bench.shapes import QUANTIZED, SHAPES, write_checkpoint
from dovetail import LLMEngine, SamplingParams

SETTLING = 20  # decode steps before
STEPS = 100  # that are timed
UNTIL_ALL_DECODE = 300  # steps, at most
PROFILED = 20  # after those; the profiler makes a step some 10 % longer
KERNELS = 24  # that are told


def begin(engine: LLMEngine, rows: int, context: int, rng: random.Random) -> list[str]:
    """Add this many requests and run until all decode. Returns their ids."""
    max_tokens = UNTIL_ALL_DECODE + SETTLING + STEPS + PROFILED
    params = SamplingParams(
        temperature=0.6, ignore_eos=True, max_tokens=max_tokens, detokenize=False
    )
    names = [f"{rows} rows, {index}" for index in range(rows)]
    for name in names:
        engine.add_request(name, [rng.randrange(10_000) for _ in range(context)], params)
    while decoded(engine) < rows:  # some are prefilled still
        pass
    device_us(engine, SETTLING)
    return names


def decoded(engine: LLMEngine) -> int:
    """Number of decodes in the step that ends next."""
    before = engine.stats().decode_tokens
    engine.step()
    return engine.stats().decode_tokens - before


def device_us(engine: LLMEngine, steps: int) -> float:
    """Return the microseconds that a step takes on the device."""
    before = engine.stats()
    for _ in range(steps):
        engine.step()
    after = engine.stats()
    return 1e6 * (after.device_s - before.device_s) / (after.steps - before.steps)


def tell(engine: LLMEngine, rows: int, context: int) -> None:
    names = begin(engine, rows, context, random.Random(rows))
    timed = device_us(engine, STEPS)
    print(f"\n{rows} rows of {context}: {timed:.0f} us a step on the device")
    tell_kernels(lambda: device_us(engine, PROFILED), PROFILED)
    engine.abort_request(names)


def tell_prompt(engine: LLMEngine, length: int) -> None:
    """Profile a step that computes a whole prompt."""
    rng = random.Random(length)

    def compute() -> float:
        before = engine.stats()
        prompt, params = (
            [rng.randrange(10_000) for _ in range(length)],
            SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False),
        )
        engine.add_request(f"prompt {rng.random()}", prompt, params)
        while engine.has_unfinished_requests():
            engine.step()
        return 1e6 * (engine.stats().device_s - before.device_s)

    times = [compute() for _ in range(4)]
    print(f"\na prompt of {length}: {min(times):.0f} us on the device")
    tell_kernels(compute, 1)


def tell_kernels(run: Callable[[], object], steps: int) -> None:
    """Run this many steps, and print how long each kernel took per step."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    events = sorted(trace.key_averages(), key=lambda event: -event.self_device_time_total)
    busy = sum(event.self_device_time_total for event in events) / steps
    print(f"while it is profiled, {busy:.0f} us in kernels")
    for event in events[:KERNELS]:
        print(
            f"{event.self_device_time_total / steps:9.1f} us {event.count / steps:7.1f} x  "
            f"{event.key[:110]}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-0.6b", choices=SHAPES)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 256])
    parser.add_argument("--context", type=int, default=800)
    parser.add_argument(
        "--prompts",
        type=int,
        nargs="*",
        default=[],
        help="lengths of prompts, each computed in one step",
    )
    parser.add_argument("--layers", type=int, help="of the model, instead of the shape's")
    parser.add_argument(
        "--checkpoint", choices=QUANTIZED, help="format of weights, instead of bfloat16"
    )
    parser.add_argument("--attention", default="triton")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="further keys of engine.yaml"
    )
    args = parser.parse_args()
    require_gpu()
    shape = (
        SHAPES[args.shape]
        if args.layers is None
        else replace(SHAPES[args.shape], layers=args.layers)
    )
    sizes = {
        "max_num_seqs": max(args.rows),
        "max_model_len": max([args.context + 2 * UNTIL_ALL_DECODE, *(n + 1 for n in args.prompts)]),
    }
    sizes["max_num_batched_tokens"] = max([8192, *args.prompts])
    parts = {"attention": args.attention, "prefill_limit": None}  # prompts as quickly as they can
    settings = {"load_format": "dummy", **sizes, **parts}
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(shape, Path(directory), args.checkpoint)
        config = {"model": directory, **settings, **settings_of(args.set)}
        with uniform_routing(shape) as routing, LLMEngine.from_config(config) as engine:
            print(f"{args.shape}, random weights")
            for rows in args.rows:
                tell(engine, rows, args.context)
                print(
                    " ".join(
                        f"{name} {value:.1f}" for name, value in routing.details(rows).items()
                    ),
                    flush=True,
                )
            for length in args.prompts:
                tell_prompt(engine, length)


if __name__ == "__main__":
    main()
