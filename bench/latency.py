"""TTFT, TPOT and ITL of one engine on a GPU, under open-loop load.

    python -m bench.latency --rate 4 16 --overlap on off --json out.json      # Poisson arrivals
    python -m bench.latency --workload stall                                  # long prompts among 64 streamed answers

Times are measured from the intended arrival. Random weights in the model's true shape, bfloat16,
random prompts, temperature 0.6, detokenization on, everything else as `engine.yaml` has it by
default. The share of the floor is of the device's busy time: what memory and matrix units would
need for the same requests in the same batches (`bench/limits.py`).
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.driver import Driver, Timeline, poisson, quantiles
from bench.engines import settings_of
from bench.limits import Limits, busy_floor_seconds, measure_limits, require_gpu
from bench.shapes import SHAPES, write_checkpoint
from dovetail import LLMEngine

MAX_ID = 10_000

# answers that go on: their contexts are 1,000 tokens on average
STREAMS = 64
STREAM_PROMPT = 500
STREAM_OUTPUT = 1000
LONG_PROMPT = 4096
LONG_RATE = 4.0
UNDISTURBED_S = 5.0
LONGEST = 10  # steps that are told of one by one
UNCHUNKED = {"prefill_limit": None}  # a prompt of 4,096 fits the default budget of a step


def prompt_of(length: int, seed: int) -> array[int]:
    """An array, which the garbage collector leaves alone, as all that clients hold
    (`bench/driver.py`)."""
    rng = random.Random(seed)
    return array("q", (rng.randint(0, MAX_ID) for _ in range(length)))


@contextmanager
def engine_of(directory: Path, settings: dict[str, Any]) -> Iterator[LLMEngine]:
    with LLMEngine.from_config(
        {"model": str(directory), "load_format": "dummy", "dtype": "bfloat16", **settings}
    ) as engine:
        yield engine
    gc.collect()
    torch.cuda.empty_cache()


def warm_up(engine: LLMEngine, longest: int) -> None:
    """Kernels for prefills, chunks, decodes, and both in a step."""
    driver = Driver(engine)
    now = engine.now()
    for index in range(8):
        driver.schedule(
            "warm-up",
            now + 0.2 * index,
            prompt_of(longest if index % 2 else 60, seed=-1 - index),
            300,
        )
    driver.run()


class Split:
    """Share of each part of the time of steps since its creation."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine, self._before, self._began = engine, engine.stats(), engine.now()

    def told(self) -> dict[str, float]:
        now = self._engine.stats()
        before = self._before
        steps = max(1, now.steps - before.steps)
        wall = self._engine.now() - self._began
        return {
            "wall_s": wall,
            "steps": steps,
            "device_busy_share": (now.device_s - before.device_s) / wall,
            "device_ms_a_step": 1e3 * (now.device_s - before.device_s) / steps,
            "gap_ms_a_step": 1e3 * (wall - now.device_s + before.device_s) / steps,
            "core_ms_a_step": 1e3 * (now.core_s - before.core_s) / steps,
            "preemptions": now.preemptions - before.preemptions,
        }


def under_poisson(
    args: argparse.Namespace,
    directory: Path,
    limits: Limits,
    rate: float,
    overlap: bool,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Requests of about `--prompt` and `--output` tokens: each is drawn from half to one and a half
    times that."""
    with engine_of(directory, {"overlap": overlap, **settings}) as engine:
        warm_up(engine, args.prompt)
        driver = Driver(engine)
        split = Split(engine)
        rng = random.Random(args.seed)
        begin = engine.now() + 0.5
        for index, at in enumerate(poisson(rate, args.seconds, args.seed)):
            prompt, output = (
                rng.randint(mean // 2, 3 * mean // 2) for mean in (args.prompt, args.output)
            )
            driver.schedule("request", begin + at, prompt_of(prompt, seed=index), output)
        driver.run()
        return {
            "workload": "poisson",
            "rate": rate,
            "overlap": overlap,
            **latencies(driver.timelines),
            **split.told(),
            "share_of_floor": busy_floor_seconds(
                SHAPES[args.shape], lens_of(driver.timelines), driver.decodes, limits
            )
            / max(1e-9, engine.stats().device_s - split._before.device_s),
        }


def lens_of(timelines: list[Timeline]) -> list[tuple[int, int]]:
    return [(timeline.prompt_tokens, timeline.output_tokens) for timeline in timelines]


def latencies(timelines: list[Timeline]) -> dict[str, Any]:
    longer = [timeline for timeline in timelines if timeline.output_tokens > 1]
    return {
        "requests": len(timelines),
        "ttft_ms": quantiles(timeline.ttft for timeline in timelines),
        "tpot_ms": quantiles(timeline.tpot for timeline in longer),
        "itl_ms": quantiles(gap for timeline in longer for gap in timeline.gaps()),
    }


def stalled(args: argparse.Namespace, directory: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """`STREAMS` answers go on throughout, each taken up again as it ends (its prompt is in the
    prefix cache by then). First nothing disturbs them, then long prompts come."""
    with engine_of(directory, settings) as engine:
        warm_up(engine, LONG_PROMPT)
        driver = Driver(engine)
        begin = engine.now() + 0.5
        # till `calm` the streams get under way, and nothing is measured
        calm = begin + UNDISTURBED_S
        rough = begin + 2 * UNDISTURBED_S
        end = rough + args.seconds

        def stream(index: int, output_tokens: int) -> None:
            def again(now: float) -> None:
                if now < end:
                    driver.schedule("stream", now, prompt, STREAM_OUTPUT, again)

            prompt = prompt_of(STREAM_PROMPT, seed=index)
            driver.schedule("stream", begin, prompt, output_tokens, again)

        for index in range(STREAMS):
            # the first answers end one after the other
            stream(index, 1 + (index + 1) * STREAM_OUTPUT // STREAMS)
        for index, at in enumerate(poisson(LONG_RATE, args.seconds, args.seed)):
            driver.schedule("prompt", rough + at, prompt_of(LONG_PROMPT, seed=10_000 + index), 1)
        driver.run(until=calm)
        driver.run(until=rough)
        split = Split(engine)
        driver.run(until=end)
        told = split.told()
        driver.run()
        streams = driver.of("stream")
        prompts = driver.of("prompt")
        undisturbed = quantiles(gap for timeline in streams for gap in timeline.gaps(calm, rough))
        disturbed = quantiles(gap for timeline in streams for gap in timeline.gaps(rough, end))
        served = [timeline for timeline in prompts if timeline.stamps[0] < end]
        return {
            "workload": "stall",
            "settings": settings,
            "undisturbed_itl_ms": undisturbed,
            "itl_ms": disturbed,
            "max_itl_over_undisturbed_p50": disturbed["max"] / undisturbed["p50"],
            "p99.9_itl_over_undisturbed_p50": disturbed["p99.9"] / undisturbed["p50"],
            "prompt_ttft_ms": quantiles(timeline.ttft for timeline in prompts),
            "prompts": len(prompts),
            "prompt_tok_s": LONG_PROMPT * len(served) / args.seconds,
            **told,
            "longest_steps": [asdict(step) for step in driver.longest(LONGEST, rough, end)],
        }


def show(row: dict[str, Any]) -> None:
    for key, value in row.items():
        if (
            isinstance(value, dict)
            and value
            and all(isinstance(number, float) for number in value.values())
        ):
            print(
                f"  {key:32} "
                + "  ".join(f"{name} {number:9.3f}" for name, number in value.items())
            )
        elif isinstance(value, list):
            print(
                f"  {key:32} "
                + f"\n{'':35}".join(
                    "  ".join(f"{name} {number:.6g}" for name, number in entry.items())
                    for entry in value
                )
            )
        else:
            print(f"  {key:32} {value:.4g}" if isinstance(value, float) else f"  {key:32} {value}")
    print(flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", choices=["poisson", "stall"], default="poisson")
    parser.add_argument("--shape", default="qwen3-0.6b", choices=SHAPES)
    parser.add_argument(
        "--rate", nargs="+", type=float, default=[4.0, 16.0, 64.0], help="requests a second"
    )
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="duration of arrivals, or of long prompts"
    )
    parser.add_argument("--prompt", type=int, default=512, help="tokens, on average")
    parser.add_argument("--output", type=int, default=128, help="tokens, on average")
    parser.add_argument("--overlap", nargs="+", choices=["on", "off"], default=["on", "off"])
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="further keys of engine.yaml"
    )
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def main() -> None:
    args = parse()
    require_gpu()
    settings: dict[str, Any] = {"attention": args.attention, **settings_of(args.set)}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_checkpoint(SHAPES[args.shape], directory)

        def tell(row: dict[str, Any]) -> None:
            rows.append(row)
            show(row)
            if args.json:
                Path(args.json).write_text(json.dumps(rows, indent=2))

        if args.workload == "stall":
            for changes in ({}, UNCHUNKED):
                tell(stalled(args, directory, {**settings, **changes}))
            bounded, free = rows
            print(
                f"prefill throughput over unchunked: "
                f"{bounded['prompt_tok_s'] / free['prompt_tok_s']:.3f}"
            )
            return
        limits = measure_limits(SHAPES[args.shape])
        for rate in args.rate:
            for overlap in args.overlap:
                tell(under_poisson(args, directory, limits, rate, overlap == "on", settings))


if __name__ == "__main__":
    main()
