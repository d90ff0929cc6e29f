"""Dovetail compared with transformers' `generate` on this machine's CPU: float32, greedy, the same
weights and work in one process.

    python bench/cpu_vs_transformers.py              # both comparisons
    python bench/cpu_vs_transformers.py --only 5m    # or 0.6b

5m: 64 requests with prompts of 8 to 256 tokens and outputs of 16 to 256, on a model of 5 M
parameters. transformers gets its best static batching: of several batch sizes, with requests sorted
so that each batch has outputs of like length, the fastest counts; a batch runs until its longest
output is done. Tokens per second count the tokens that were asked for.

0.6b: one request at a time (prompt 32, output 24) on a model of Qwen3-0.6B's shape with random
weights.

The two alternate, run by run; the medians are compared.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dovetail import LLM, SamplingParams

Work = list[tuple[list[int], int]]  # prompt, tokens to generate
BATCH_SIZES = (8, 16, 32, 64)

FIVE_M = Qwen3Config(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    tie_word_embeddings=True,
    max_position_embeddings=1024,
)
SIX_HUNDRED_M = Qwen3Config(
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=True,
    max_position_embeddings=40_960,
)


def mixed_work(count: int, vocab_size: int) -> Work:
    rng = random.Random(0)
    return [
        ([rng.randrange(1, vocab_size) for _ in range(rng.randint(8, 256))], rng.randint(16, 256))
        for _ in range(count)
    ]


def run_dovetail(llm: LLM, work: Work) -> float:
    """Seconds."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        for _, count in work
    ]
    llm.engine.reset_prefix_cache()
    begun = time.perf_counter()
    outputs = llm.generate([prompt for prompt, _ in work], params, use_tqdm=False)
    seconds = time.perf_counter() - begun
    produced = sum(len(output.outputs[0].token_ids) for output in outputs)
    asked = sum(count for _, count in work)
    if produced != asked:
        raise SystemExit(f"Dovetail generated {produced} tokens, not {asked}")
    return seconds


@torch.inference_mode()
def run_transformers(model: torch.nn.Module, work: Work, batch_size: int) -> float:
    """Seconds, in static batches of requests whose outputs are of like length, padded on the
    left."""
    ordered = sorted(work, key=lambda item: item[1])
    begun = time.perf_counter()
    for start in range(0, len(ordered), batch_size):
        batch = ordered[start : start + batch_size]
        longest = max(len(prompt) for prompt, _ in batch)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in batch])
        mask = torch.tensor(
            [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in batch]
        )
        steps = max(count for _, count in batch)
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=steps,
            min_new_tokens=steps,
            do_sample=False,
            pad_token_id=0,
        )
    return time.perf_counter() - begun


def alternate(
    ours: Callable[[], float], theirs: Callable[[], float], runs: int
) -> tuple[float, float]:
    """Return the medians of both, run alternately after a warm-up of each."""
    ours(), theirs()
    pairs = [(ours(), theirs()) for _ in range(runs)]
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


def compare(
    name: str, config: Qwen3Config, work: Work, batch_sizes: tuple[int, ...], runs: int
) -> dict[str, float | str | int]:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory:
        Qwen3ForCausalLM(config).save_pretrained(Path(directory))
        reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        reference.generation_config.eos_token_id = None
        with LLM(directory, dtype="float32", max_model_len=1024, generation_config="none") as llm:
            best = (
                min(batch_sizes, key=lambda size: run_transformers(reference, work, size))
                if len(batch_sizes) > 1
                else batch_sizes[0]
            )
            ours, theirs = alternate(
                lambda: run_dovetail(llm, work),
                lambda: run_transformers(reference, work, best),
                runs,
            )
    tokens = sum(count for _, count in work)
    result = {
        "work": name,
        "tokens": tokens,
        "dovetail_tok_s": tokens / ours,
        "transformers_tok_s": tokens / theirs,
        "transformers_batch": best,
        "ratio": theirs / ours,
    }
    print(
        f"{name:>5}: Dovetail {result['dovetail_tok_s']:8.1f} tok/s, transformers (batches of "
        f"{best}) {result['transformers_tok_s']:8.1f} tok/s, "
        f"ratio {result['ratio']:.2f}",
        flush=True,
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=["5m", "0.6b"])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    rng = random.Random(1)
    works = {
        "5m": (FIVE_M, mixed_work(64, FIVE_M.vocab_size), BATCH_SIZES),
        "0.6b": (SIX_HUNDRED_M, [([rng.randrange(1, 151_000) for _ in range(32)], 24)], (1,)),
    }
    results = [
        compare(name, *work, args.runs) for name, work in works.items() if args.only in (None, name)
    ]
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
