"""The host's time per step under a schema, without a GPU: the engine over an executor that only
draws tokens from the masks, each as likely as any.

    python -m bench.schema_host --tokenizer DIRECTORY                        # of a model: tokenizer.json and tokenizer_config.json, such as Qwen3's
    python -m bench.schema_host --tokenizer DIRECTORY --schemas tags call --requests 64 256 --processes 8

Milliseconds of CPU of the engine's thread, without the executor's: of the whole step, and of its
parts. Masks that processes or threads fill aren't in it: wall time, on a machine with a core for
each, is what users have.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict, deque
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.schemas import SCHEMAS, endless
from dovetail import SamplingParams, Structured
from dovetail.api.clock import WallClock
from dovetail.api.component import NoOptions
from dovetail.api.executor import (
    Batch,
    Capacity,
    Executor,
    ExecutorCapabilities,
    ExecutorContext,
    Masks,
    Result,
)
from dovetail.api.kv_cache import CacheGroup, KVContext, KVLayout
from dovetail.api.scheduler import SchedulerContext
from dovetail.config.engine import EngineConfig
from dovetail.engine import core as core_module
from dovetail.engine.core import CoreSettings, EngineCore
from dovetail.engine.features import features_of
from dovetail.engine.masks import MaskFill
from dovetail.front.answer_rules import AnswerRules
from dovetail.front.assembly import Assembly
from dovetail.front.component_values import ComponentValues
from dovetail.front.generation_config import GenerationDefaults
from dovetail.front.llm_engine import LLMEngine
from dovetail.front.tokenizer import Tokenizer
from dovetail.registry.models import resolve_model
from dovetail.registry.registry import Registry
from dovetail.request.sampling_params import OutputKind

VOCABULARY = 151_936
BLOCK_SIZE = 16
PROMPT = 100
OUTPUT = 290
STEPS = 100
SKIPPED = 40  # the first, in which threads and what they share are made
READY_S = 60
TRIES = 256  # ids drawn at once, of which the first allowed one is taken

spent: defaultdict[str, float] = defaultdict(float)  # seconds of CPU by part of a step


def timed(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def timed_call(*args: Any, **kwargs: Any) -> Any:
        begun = time.thread_time()
        try:
            return call(*args, **kwargs)
        finally:
            spent[part] += time.thread_time() - begun

    return timed_call


class Drawing(Executor):
    """Every row yields a token at once, which its mask allows."""

    capabilities = ExecutorCapabilities(masks=True)

    def __init__(self, num_pages: int) -> None:
        super().__init__(NoOptions(), ExecutorContext(config=None, clock=WallClock()))  # type: ignore[arg-type]
        self.num_pages = num_pages
        self.chance = np.random.default_rng(0)
        self.batches: deque[Batch] = deque()
        self.drawn: dict[int, tuple[Any, Any]] = {}  # step -> lines and tokens

    def start(self) -> Capacity:
        layout = KVLayout((CacheGroup((0,), BLOCK_SIZE),), 1, "none")
        return Capacity(self.num_pages, 2, layout, VOCABULARY, PROMPT + 2 * OUTPUT)

    def submit(self, batch: Batch) -> int:
        self.batches.append(batch)
        return batch.step

    def sample(self, handle: int, masks: Masks) -> None:
        tokens = [self.draw(words.view(np.uint8)) for words in masks.words]
        self.drawn[handle] = masks.lines.copy(), np.array(tokens, np.int64)

    def draw(self, bits: Any) -> int:
        """Return a token of a mask [bytes], without a look at all of them if it allows many."""
        ids = self.chance.integers(0, VOCABULARY, TRIES)
        allowed = (bits[ids >> 3] >> (ids & 7).astype(np.uint8)) & 1
        if allowed.any():
            return int(ids[allowed.argmax()])
        places = np.flatnonzero(bits)
        set_bits = np.flatnonzero(np.unpackbits(bits[places], bitorder="little"))
        chosen = int(set_bits[self.chance.integers(len(set_bits))])
        return int(places[chosen >> 3]) * 8 + (chosen & 7)

    def collect(self, handle: int) -> Result:
        batch = self.batches.popleft()
        tokens = np.where(batch.yields_token, 1000 + batch.rows % 700, -1).astype(np.int64)
        if handle in self.drawn:
            lines, drawn = self.drawn.pop(handle)
            tokens[np.flatnonzero(batch.yields_token)[lines]] = drawn
        return Result(batch.step, tokens, 0.0, 0.001)

    def check(self) -> None: ...

    def stop(self) -> None: ...


def make_engine(num_seqs: int, directory: Path, processes: int) -> LLMEngine:
    """Return an engine assembled like in `LLMEngine.from_config`, except for the executor."""
    registry = Registry.discover()
    config = EngineConfig.load({"model": "demo", "max_num_seqs": num_seqs})
    num_pages = num_seqs * (PROMPT + 2 * OUTPUT) // BLOCK_SIZE
    executor = Drawing(num_pages)
    capacity = executor.start()
    kv = registry.resolve("kv_cache", "prefix").make(KVContext(capacity.layout, num_pages))
    limits = 65_536, num_seqs
    context = SchedulerContext(*limits, num_pages, BLOCK_SIZE, 0)
    core = EngineCore(
        registry.resolve("scheduler", "fcfs").make(context),
        kv,
        executor,
        capacity,
        WallClock(),
        CoreSettings(num_seqs, 65_536, True, "fcfs", config.prefill_limit),
        features=features_of(capacity),
    )
    model_dir = resolve_model("demo", registry)
    tokenizer = cache(partial(Tokenizer.load, directory))
    stops = (tokenizer().own.eos_token_id,)
    grammar = registry.resolve("grammar", "llguidance", {"processes": processes})
    rules = AnswerRules(grammar, tokenizer, VOCABULARY, stops, config.limits)
    return LLMEngine(
        Assembly(
            config,
            core,
            capacity,
            model_dir,
            model_dir,
            GenerationDefaults(eos_token_ids=stops),
            ComponentValues(capacity, tokenizer, {}),
            tokenizer,
            rules,
            has_masks=True,
        )
    )


def measure(engine: LLMEngine, num_seqs: int, schema: str | None) -> dict[str, float]:
    """Return milliseconds of CPU a step, while all requests decode: "all", and by part."""
    rule: dict[str, Any] = (
        {"ignore_eos": True}
        if schema is None
        else {"structured": Structured(json_schema=endless(SCHEMAS[schema]))}
    )
    params = SamplingParams(max_tokens=OUTPUT, output_kind=OutputKind.FINAL, **rule)
    ids = [f"{schema} {number}" for number in range(num_seqs)]
    for number, id in enumerate(ids):
        engine.add_request(id, [number + 1] + [5] * (PROMPT - 1), params)
    stats = engine.core.stats
    decoding = stats.decode_tokens + SKIPPED * num_seqs
    while stats.decode_tokens < decoding:
        engine.step()
    spent.clear()
    last = stats.steps + STEPS
    begun = time.thread_time()
    while stats.steps < last:
        engine.step()
    spent["all"] = time.thread_time() - begun - spent.pop("executor", 0.0)
    engine.abort_request(ids)
    while engine.has_unfinished_requests():
        engine.step()
    return {part: 1e3 * seconds / STEPS for part, seconds in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="DIRECTORY")
    parser.add_argument("--schemas", nargs="+", default=list(SCHEMAS), choices=SCHEMAS)
    parser.add_argument("--requests", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--processes", type=int, default=0, help="as the option of llguidance")
    args = parser.parse_args()
    for name in ("submit", "sample", "collect"):
        setattr(Drawing, name, timed("executor", getattr(Drawing, name)))
    core_module.accept_tokens = timed("accept", core_module.accept_tokens)  # type: ignore[attr-defined]
    for name in ("__init__", "start", "finish"):
        setattr(MaskFill, name, timed("masks", getattr(MaskFill, name)))
    for num_seqs in args.requests:
        engine = make_engine(num_seqs, args.tokenizer, args.processes)
        for schema in (None, *args.schemas):
            row = measure(engine, num_seqs, schema)
            parts = "  ".join(f"{part} {row[part]:.2f}" for part in sorted(row) if part != "all")
            print(
                f"{num_seqs:>4} x {schema or 'plain':<9} {row['all']:.2f} ms  {parts}", flush=True
            )
        engine.close()


if __name__ == "__main__":
    main()
