"""The core's own time per step: policy, accounting, batch, results, stop checks and delta outputs,
with a no-op executor.

    python bench/core_overhead.py                   # 256 and 1,024 running decodes, short and long requests, ids only and with text
    python bench/core_overhead.py --json out.json

Each figure is the median, over the steps, of the wall time of `LLMEngine.step()`. The work of a
step doesn't depend on how long the requests are: the two contexts show it. "Streamed" is the mean
of an `AsyncLLMEngine`, ids only, each request read by a task of its own in one event loop. Last
come prompts, which the prefix cache hashes: the median CPU time of steps that admit 16 of 2,000
tokens, none of which begin alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections import deque
from functools import cache, partial

import numpy as np

from dovetail.api.clock import WallClock
from dovetail.api.component import NoOptions
from dovetail.api.executor import Batch, Capacity, Executor, ExecutorContext, Result
from dovetail.api.kv_cache import CacheGroup, KVContext, KVLayout
from dovetail.api.scheduler import SchedulerContext
from dovetail.config.engine import EngineConfig
from dovetail.engine.core import CoreSettings, EngineCore
from dovetail.engine.features import features_of
from dovetail.front.answer_rules import AnswerRules
from dovetail.front.assembly import Assembly
from dovetail.front.async_engine import AsyncLLMEngine
from dovetail.front.component_values import ComponentValues
from dovetail.front.generation_config import GenerationDefaults
from dovetail.front.llm_engine import LLMEngine
from dovetail.front.tokenizer import Tokenizer
from dovetail.registry.models import resolve_model
from dovetail.registry.registry import Registry
from dovetail.request.sampling_params import OutputKind, SamplingParams

BLOCK_SIZE = 16
MAX_LEN = 32_768


class NullExecutor(Executor):
    """No-op executor: every row yields a token at once."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(NoOptions(), ExecutorContext(config=None, clock=WallClock()))  # type: ignore[arg-type]
        self.num_pages = num_pages
        self.batches: deque[Batch] = deque()

    def start(self) -> Capacity:
        layout = KVLayout((CacheGroup((0,), BLOCK_SIZE),), 1, "none")
        return Capacity(self.num_pages, 2, layout, 1024, MAX_LEN)

    def submit(self, batch: Batch) -> None:
        self.batches.append(batch)

    def collect(self, handle: None) -> Result:
        batch = self.batches.popleft()
        token_ids = np.where(batch.yields_token, 100 + batch.rows % 700, -1).astype(np.int64)
        return Result(batch.step, token_ids, 0.0, 0.001)

    def check(self) -> None: ...

    def stop(self) -> None: ...


def make_engine(num_seqs: int, context: int, hash: str = "xxh3") -> LLMEngine:
    """Return an engine assembled like in `LLMEngine.from_config`, except for the executor."""
    registry = Registry.discover()
    config = EngineConfig.load({"model": "demo", "max_num_seqs": num_seqs})
    num_pages = num_seqs * (context + 1024) // BLOCK_SIZE + MAX_LEN // BLOCK_SIZE
    executor = NullExecutor(num_pages)
    capacity = executor.start()
    kv = registry.resolve("kv_cache", "prefix", {"hash": hash}).make(
        KVContext(capacity.layout, num_pages)
    )
    scheduler = registry.resolve("scheduler", "fcfs").make(
        SchedulerContext(65_536, num_seqs, num_pages, BLOCK_SIZE, 0)
    )
    core = EngineCore(
        scheduler,
        kv,
        executor,
        capacity,
        WallClock(),
        CoreSettings(num_seqs, 65_536, True, "fcfs", config.prefill_limit),
        features=features_of(capacity),
    )
    model_dir = resolve_model("demo", registry)
    tokenizer = cache(partial(Tokenizer.load, model_dir))
    values = ComponentValues(capacity, tokenizer, {})
    rules = AnswerRules(None, tokenizer, capacity.vocab_size, (), config.limits)
    assembly = Assembly(
        config, core, capacity, model_dir, model_dir, GenerationDefaults(), values, tokenizer, rules
    )
    return LLMEngine(assembly)


def measure(num_seqs: int, context: int, text: bool, steps: int) -> float:
    """Return the median milliseconds of a step in which all `num_seqs` requests decode."""
    engine = make_engine(num_seqs, context)
    params = SamplingParams(
        max_tokens=1000, ignore_eos=True, detokenize=text, output_kind=OutputKind.DELTA
    )
    for index in range(num_seqs):
        engine.add_request(str(index), [index % 512 + 1] + [5] * (context - 1), params)
    while engine.stats().decode_tokens < num_seqs * 20:
        engine.step()
    times = []
    for _ in range(steps):
        begun = time.perf_counter()
        outputs = engine.step()
        times.append(time.perf_counter() - begun)
        if len(outputs) != num_seqs:
            raise SystemExit(
                f"a step gave {len(outputs)} outputs, not {num_seqs}: not all requests were "
                f"decoding"
            )
    return statistics.median(times) * 1e3


def measure_prompts(hash: str, steps: int, prompts: int = 16, tokens: int = 2000) -> float:
    """Return the median CPU milliseconds of a step that admits and computes this many prompts,
    without the executor's time."""
    engine = make_engine(prompts, tokens, hash)
    params = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)
    times = []
    for step in range(steps):
        for index in range(prompts):
            engine.add_request(str(index), [step % 1000, index] * (tokens // 2), params)
        begun = time.thread_time()
        while engine.has_unfinished_requests():
            engine.step()
        times.append(time.thread_time() - begun)
    return statistics.median(times) * 1e3


async def streaming_seconds(num_seqs: int, context: int, tokens: int) -> float:
    """Return the time of `num_seqs` answers of this many tokens, from the first request to the last
    token read."""
    params = SamplingParams(
        max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=OutputKind.DELTA
    )
    async with AsyncLLMEngine(make_engine(num_seqs, context)) as engine:

        async def read(index: int) -> None:
            async for _ in engine.generate(
                str(index), [index % 512 + 1] + [5] * (context - 1), params
            ):
                pass

        begun = time.perf_counter()
        await asyncio.gather(*map(read, range(num_seqs)))
        return time.perf_counter() - begun


def measure_streamed(num_seqs: int, context: int, steps: int) -> float:
    """Return the mean milliseconds of a step of `num_seqs` streamed answers, measured over `steps`
    additional steps."""
    short, long = (
        asyncio.run(streaming_seconds(num_seqs, context, tokens)) for tokens in (20, 20 + steps)
    )
    return (long - short) / steps * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--contexts", type=int, nargs="+", default=[100, 4000])
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    rows = []
    print(
        f"{'requests':>8} {'context':>8} {'ids only':>10} {'with text':>10} {'streamed':>10}   "
        f"(median ms a step)"
    )
    for num_seqs in (256, 1024):
        for context in args.contexts:
            ids, text = (measure(num_seqs, context, text, args.steps) for text in (False, True))
            streamed = measure_streamed(num_seqs, context, args.steps)
            rows.append(
                {
                    "requests": num_seqs,
                    "context": context,
                    "ids_ms": ids,
                    "text_ms": text,
                    "streamed_ms": streamed,
                }
            )
            print(
                f"{num_seqs:>8} {context:>8} {ids:>10.2f} {text:>10.2f} {streamed:>10.2f}",
                flush=True,
            )
    for hash in ("xxh3", "sha256"):
        prompts_ms = measure_prompts(hash, args.steps)
        rows.append({"prompts": 16, "tokens": 2000, "hash": hash, "step_ms": prompts_ms})
        print(
            f"a step that admits 16 prompts of 2,000 tokens, kv_cache.hash {hash}: "
            f"{prompts_ms:.2f} ms of CPU time",
            flush=True,
        )
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=2)


if __name__ == "__main__":
    main()
