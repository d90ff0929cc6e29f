"""Which kernels a decode step spends its time in, on a GPU.

python -m bench.profile_decode --rows 1 8 256 --context 800
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from bench.limits import require_gpu
from bench.shapes import SHAPES, write_checkpoint
from dovetail import LLMEngine, SamplingParams

STEPS = 20


def profile_rows(shape: str, rows: int, context: int, attention: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(SHAPES[shape], Path(directory))
        settings = {"model": directory, "load_format": "dummy", "max_num_seqs": rows, "max_model_len": context + 500, "attention": attention}
        with LLMEngine.from_config(settings) as engine:
            params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=400, detokenize=False)
            rng = random.Random(0)
            for index in range(rows):
                engine.add_request(str(index), [rng.randrange(10_000) for _ in range(context)], params)
            while engine.stats().decode_tokens < 20 * rows:
                engine.step()
            before = engine.stats()
            with profile(activities=[ProfilerActivity.CUDA]) as trace:
                for _ in range(STEPS):
                    engine.step()
                torch.cuda.synchronize()
            after = engine.stats()
    steps = after.steps - before.steps
    events = sorted(trace.key_averages(), key=lambda event: -event.self_device_time_total)
    busy = sum(event.self_device_time_total for event in events) / steps
    device_us = 1e6 * (after.device_s - before.device_s) / steps
    print(f"\n{shape}, {rows} rows of {context}: {device_us:.0f} us a step on the device, {busy:.0f} us in kernels")
    for event in events[:16]:
        print(f"{event.self_device_time_total / steps:9.1f} us {event.count / steps:7.1f} x  {event.key[:110]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b", choices=SHAPES)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 256])
    parser.add_argument("--context", type=int, default=800)
    parser.add_argument("--attention", default="triton")
    args = parser.parse_args()
    require_gpu()
    for rows in args.rows:
        profile_rows(args.shape, rows, args.context, args.attention)


if __name__ == "__main__":
    main()
