"""Time of token masks, without a GPU or a model: one answer, and many together, for the ten schemas
of `bench/schemas.py`.

    python -m bench.masks --tokenizer DIRECTORY                              # of a model: tokenizer.json and tokenizer_config.json, such as Qwen3's
    python -m bench.masks --tokenizer DIRECTORY --grammar llguidance --schemas tags call --json out.json

Answers of tokens drawn from the masks, each as likely as any. One answer: CPU milliseconds of a
mask, and microseconds for going on by a token. Many together: wall milliseconds of all masks of a
step, over the threads that the backend takes.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.schemas import SCHEMAS, endless
from dovetail.api.grammar import GrammarBackend, GrammarContext, GrammarSpec, Matcher
from dovetail.front.grammars import token_bytes
from dovetail.front.tokenizer import Tokenizer
from dovetail.registry.registry import Registry

VOCABULARY = 151_936
# one after the other
ANSWERS = 4
TOKENS = 200
# of answers together; masks of the first aren't counted, since threads and what they share are
# being made
STEPS = 40
SKIPPED = 10


def context_of(directory: Path) -> GrammarContext:
    tokenizer = Tokenizer.load(directory)
    plain, _ = token_bytes(tokenizer, VOCABULARY)
    stop = tokenizer.own.eos_token_id
    return GrammarContext(plain, frozenset() if stop is None else frozenset([stop]), VOCABULARY)


def drawn(line: Any, chance: np.random.Generator) -> int:
    return int(chance.choice(np.flatnonzero(np.unpackbits(line.view(np.uint8), bitorder="little"))))


def one_answer(matcher: Matcher, chance: np.random.Generator) -> tuple[list[float], list[float]]:
    """Return the CPU milliseconds of each mask, and of each token."""
    words = np.zeros(-(-VOCABULARY // 32), np.uint32)
    masks = []
    tokens = []
    for _ in range(TOKENS):
        begun = time.thread_time()
        matcher.fill(words)
        filled = time.thread_time()
        token = drawn(words, chance)
        before = time.thread_time()
        if not matcher.accept(token):
            raise RuntimeError(f"token {token} isn't accepted, which the mask allows")
        if matcher.complete:
            break
        tokens.append(1e3 * (time.thread_time() - before))
        masks.append(1e3 * (filled - begun))
    return masks, tokens


def together(
    backend: GrammarBackend, matchers: list[Matcher], chance: np.random.Generator
) -> dict[str, float]:
    words = np.zeros((len(matchers), -(-VOCABULARY // 32)), np.uint32)
    walls = []
    cpus = []
    for _ in range(STEPS):
        begun = time.perf_counter()
        cpu = time.process_time()
        backend.fill_many(matchers, words)
        walls.append(1e3 * (time.perf_counter() - begun))
        cpus.append(1e3 * (time.process_time() - cpu))
        for matcher, line in zip(matchers, words, strict=True):
            matcher.accept(drawn(line, chance))
    walls = walls[SKIPPED:]
    cpus = cpus[SKIPPED:]
    return {
        "wall_mean": float(np.mean(walls)),
        "wall_p90": float(np.percentile(walls, 90)),
        "cpu_mean": float(np.mean(cpus)),
    }


def measured(backend: GrammarBackend, schema: str, counts: list[int]) -> dict[str, Any]:
    begun = time.process_time()
    grammar = backend.compile(GrammarSpec("json_schema", json.dumps(endless(SCHEMAS[schema]))))
    compiled = time.process_time() - begun
    chance = np.random.default_rng(0)
    answers = [one_answer(grammar.begin(), chance) for _ in range(ANSWERS)]
    masks, tokens = (np.concatenate(each) for each in zip(*answers, strict=True))
    return {
        "compile_ms": 1e3 * compiled,
        "mask_mean": float(np.mean(masks)),
        **{f"mask_p{share}": float(np.percentile(masks, share)) for share in (50, 90, 99)},
        "token_us": 1e3 * float(np.mean(tokens)),
        "together": {
            count: together(backend, [grammar.begin() for _ in range(count)], chance)
            for count in counts
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        required=True,
        metavar="DIRECTORY",
        help=f"of a model with at most {VOCABULARY:,} token ids",
    )
    parser.add_argument("--grammar", nargs="+", default=["llguidance"])
    parser.add_argument("--schemas", nargs="+", default=list(SCHEMAS), choices=SCHEMAS)
    parser.add_argument("--together", nargs="*", type=int, default=[64, 256], metavar="ANSWERS")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    context = context_of(args.tokenizer)
    print(f"{os.cpu_count()} CPU cores, load {os.getloadavg()[0]:.1f}", flush=True)
    rows: list[dict[str, Any]] = []
    for name in args.grammar:
        begun = time.process_time()
        backend = Registry.discover().resolve("grammar", name).make(context)
        print(f"{name}: made in {time.process_time() - begun:.2f} s", flush=True)
        for schema in args.schemas:
            try:
                row = measured(backend, schema, args.together)
            except Exception as error:  # what a backend can't do is a result
                print(f"{name:>10} {schema:>9}  {type(error).__name__}: {error}", flush=True)
                continue
            rows.append({"grammar": name, "schema": schema, **row})
            many = "  ".join(
                f"{count} in {each['wall_mean']:.2f} (p90 {each['wall_p90']:.2f}) ms"
                for count, each in row["together"].items()
            )
            print(
                f"{name:>10} {schema:>9}  compile {row['compile_ms']:7.1f} ms  mask mean "
                f"{row['mask_mean']:.3f}  p50 {row['mask_p50']:.3f}  "
                f"p90 {row['mask_p90']:.3f}  p99 {row['mask_p99']:.3f} ms  token "
                f"{row['token_us']:.1f} us  {many}",
                flush=True,
            )
            if args.json:
                Path(args.json).write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
