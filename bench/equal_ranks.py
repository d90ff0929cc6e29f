"""Tokens of one rank and of several, in float32, with drafts, adapters and grammars among the
requests.

    python -m bench.equal_ranks                              # on two GPUs: four kinds of layers, one rank and two
    python -m bench.equal_ranks --device cpu --models demo   # the same code with ranks on the CPU

The models have true shapes with fewer layers and random weights: a dense one, one with experts, one
with windows and one with recurrent layers. Of 48 requests half are greedy and half are sampled with
a seed, a third uses one of two adapters, and a quarter has a grammar. The engine drafts from its
own texts. Each engine runs in a process of its own. Ends with status 1 if a sequence differs.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.adapters import write_adapter
from bench.apart import apart
from bench.shapes import SHAPES, Shape, write_checkpoint

REQUESTS = 48
MAX_TOKENS = 48
MODELS = {
    "dense": replace(SHAPES["qwen3-0.6b"], layers=12),
    "experts": replace(SHAPES["qwen3-30b-a3b"], layers=6),
    "windows": replace(SHAPES["gemma-3-4b"], layers=8, window=32),
    "recurrent": replace(SHAPES["qwen3.5-4b"], layers=8),
    "small": replace(SHAPES["qwen3-0.6b"], layers=2, hidden=64, intermediate=128, vocab=3000),
    "demo": None,
}


def tokens_of(model: str, ranks: int, device: str, folder: Path) -> dict[str, Any]:
    """Return the tokens of each request, and how many drafts were accepted."""
    from dovetail import LLM, LoRARequest, SamplingParams, Structured

    one = {"name": "local", "device": device}
    several = {"name": "tensor", "size": ranks, "device": device}
    settings: dict[str, Any] = {
        "dtype": "float32",
        "generation_config": "none",
        "executor": one if ranks == 1 else several,
        "max_num_seqs": 64,
        "max_model_len": 192,
        "max_num_batched_tokens": 1024,
        "adapters": {"slots": 2, "max_rank": 8},
        "speculation": {"drafter": "suffix", "max_drafts": 4},
    }
    if model != "demo":
        settings |= {"load_format": "dummy", "gpu_memory_utilization": 0.5}
    begun = time.perf_counter()
    with LLM("demo" if model == "demo" else folder, **settings) as llm:
        started = time.perf_counter() - begun
        assert llm.engine.capacity.adapters is not None
        modules = dict(llm.engine.capacity.adapters.modules)
        adapters = []
        for index in range(2):
            place = folder / f"adapter-{index}"
            if not place.exists():
                write_adapter(place, modules, 8, index)
            adapters.append(LoRARequest(f"adapter-{index}", index + 1, str(place)))
        chance = random.Random(0)
        prompts = []
        params = []
        used: list[Any] = []
        for index in range(REQUESTS):
            phrase = [chance.randint(1, 400) for _ in range(chance.randint(1, 30))]
            prompts.append({"prompt_token_ids": phrase + phrase})  # which drafts can be found in
            rule = Structured(regex=r"[ a-z0-9]{4,80}") if index % 4 == 3 else None
            params.append(
                SamplingParams(
                    temperature=float(index % 2),
                    seed=index,
                    max_tokens=MAX_TOKENS,
                    ignore_eos=rule is None,
                    structured=rule,
                )
            )
            used.append(adapters[index % 2] if index % 3 == 2 else None)
        outputs = llm.generate(prompts, params, lora_request=used, use_tqdm=False)
        stats = llm.engine.stats()
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "accepted": sum(stats.accepted_drafts),
        "start_s": started,
    }


def write_byte_level_tokenizer(shape: Shape, folder: Path) -> None:
    """Replace the tokenizer by one whose tokens' bytes are known, as grammars need; name an EOS
    id."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġw{index}" for index in range(shape.vocab - len(alphabet))]
    vocabulary = {token: index for index, token in enumerate(alphabet + words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"] = shape.vocab - 1
    (folder / "config.json").write_text(json.dumps(config))


def compare(model: str, ranks: int, device: str) -> dict[str, Any]:
    """Run a model on one rank and on several, and count the equal sequences."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        shape: Shape | None = MODELS[model]
        if shape is not None:
            write_checkpoint(shape, folder)
            write_byte_level_tokenizer(shape, folder)
        one = apart(tokens_of, model, 1, device, folder)
        several = apart(tokens_of, model, ranks, device, folder)
    pairs = zip(one["tokens"], several["tokens"], strict=True)
    return {
        "model": model,
        "ranks": ranks,
        "equal": sum(first == second for first, second in pairs),
        "of": REQUESTS,
        "tokens": sum(map(len, one["tokens"])),
        "accepted": [one["accepted"], several["accepted"]],
        "start_s": [one["start_s"], several["start_s"]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS)[:4])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    rows = []
    for model in args.models:
        rows.append(compare(model, args.ranks, args.device))
        print(json.dumps(rows[-1]), flush=True)
        if args.json:
            Path(args.json).write_text(json.dumps(rows, indent=1))
    raise SystemExit(any(row["equal"] < row["of"] for row in rows))


if __name__ == "__main__":
    main()
