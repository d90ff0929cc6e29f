"""Throughput and first tokens of requests with one image each, beside a text of as many tokens,
and beside vLLM if it can be imported.

    python -m bench.images --engine dovetail text vllm --json images.json
    python -m bench.images --engine beside

The model has the shape of Qwen3-VL-8B and random weights, in bfloat16. A request has an image of
1,024 x 1,024 pixels, 1,024 rows, and 200 tokens are generated. `text`: the same language model and
as many tokens of text, without an encoder. `beside`: requests of text only, of an engine with an
encoder and of one without in turn, in one process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.apart import apart

REQUESTS = 64
OUTPUT = 200  # tokens
SIDE = 1024  # pixels
ROWS = 1024
QUESTION = 60  # tokens of text around an image
RUNS = 3
FIRST_TOKENS = 10  # requests that run alone
FIRST_SPECIAL = 151643
START, STOP, IMAGE, VIDEO = 151652, 151653, 151655, 151656
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": STOP,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "text_config": {
        "model_type": "qwen3_vl_text",
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "hidden_act": "silu",
        "max_position_embeddings": 262144,
        "dtype": "bfloat16",
        "rope_theta": 5e6,
        "rope_scaling": {
            "rope_type": "default",
            "mrope_interleaved": True,
            "mrope_section": [24, 20, 20],
        },
    },
    "vision_config": {
        "model_type": "qwen3_vl",
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 4096,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
        "hidden_act": "gelu_pytorch_tanh",
    },
}
PREPROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
BESIDE_RUNS = 7  # of each engine
BESIDE_REQUESTS = 64
BESIDE_OUTPUT = 128  # tokens of each
BESIDE_KV = "16GiB"
Generate = Callable[[list[dict[str, Any]], int], int]  # prompts, tokens of each -> tokens of all


def write_checkpoint(directory: Path) -> None:
    """Write a checkpoint without weights: each id of the tokenizer is a word."""
    from tokenizers import Tokenizer, decoders, models

    (directory / "config.json").write_text(json.dumps(CONFIG))
    words = {f"Ġw{number}": number for number in range(FIRST_SPECIAL)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="Ġw0"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 262144,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    video = {**PREPROCESSOR, "video_processor_type": "Qwen3VLVideoProcessor"}
    (directory / "video_preprocessor_config.json").write_text(json.dumps(video))


def prompts(seed: int, count: int, *, text: bool) -> list[dict[str, Any]]:
    """Return requests with images, all different, or with as many tokens of text."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        words = random.integers(0, FIRST_SPECIAL, QUESTION + ROWS).tolist()
        half = QUESTION // 2
        before = words[:half]
        after = words[half:QUESTION]
        if text:
            made.append({"prompt_token_ids": [*before, *words[QUESTION:], 0, 0, *after]})
            continue
        # smooth, as photographs are, so that a step of the resizing isn't special
        small = random.integers(0, 256, (SIDE // 16, SIDE // 16, 3), np.uint8)
        picture = Image.fromarray(small).resize((SIDE, SIDE))
        ids = [*before, START, IMAGE, STOP, *after]
        made.append({"prompt_token_ids": ids, "multi_modal_data": {"image": picture}})
    return made


def measured(generate: Generate, *, text: bool) -> dict[str, Any]:
    """Return the seconds of `REQUESTS` requests, and of the first tokens of single ones."""
    generate(prompts(100, REQUESTS, text=text), OUTPUT)
    whole = []
    for run in range(RUNS):
        work = prompts(run, REQUESTS, text=text)
        begun = time.perf_counter()
        tokens = generate(work, OUTPUT)
        whole.append(time.perf_counter() - begun)
        if tokens != REQUESTS * OUTPUT:
            raise SystemExit(f"{tokens} tokens were generated, not {REQUESTS * OUTPUT}")
    first = []
    for run in range(FIRST_TOKENS):
        work = prompts(1000 + run, 1, text=text)
        begun = time.perf_counter()
        generate(work, 1)
        first.append(time.perf_counter() - begun)
    work = prompts(2000, REQUESTS, text=text)
    begun = time.perf_counter()
    generate(work, 1)
    return {
        "seconds": whole,
        "tokens_per_s": REQUESTS * OUTPUT / statistics.median(whole),
        "first_token_s": statistics.median(first),
        "first_tokens_of_all_s": time.perf_counter() - begun,
    }


def run_dovetail(directory: Path, *, text: bool) -> dict[str, Any]:
    from dovetail import LLM, SamplingParams

    begun = time.perf_counter()
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_num_seqs": REQUESTS,
        "max_model_len": 2048,
        "media.images": not text,
    }
    with LLM(str(directory), **settings) as llm:
        started = time.perf_counter() - begun

        def generate(work: list[dict[str, Any]], most: int) -> int:
            params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=most)
            outputs = llm.generate(work, params, use_tqdm=False)
            return sum(len(output.outputs[0].token_ids) for output in outputs)

        figures = measured(generate, text=text)
        begun = time.perf_counter()
        llm.engine.all_tokenized(prompts(3000, REQUESTS, text=text))
        prepared = time.perf_counter() - begun
        before = llm.engine.stats()
        generate(prompts(3001, REQUESTS, text=text), 1)
        after = llm.engine.stats()
        parts = {
            "prepare_all_s": prepared,
            "first_tokens_device_s": after.device_s - before.device_s,
            "first_tokens_core_s": after.core_s - before.core_s,
            "first_tokens_steps": after.steps - before.steps,
        }
        details = dict(llm.engine.capacity.details)
        return {"start_s": started, "details": details, **figures, **parts}


def run_beside(directory: Path) -> dict[str, Any]:
    """Return the seconds of requests of text on two engines, without an encoder and with one, and
    whether their tokens and their hits in the prefix cache are equal."""
    from dovetail import LLM

    settings: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_num_seqs": BESIDE_REQUESTS,
        "max_model_len": 2048,
        "kv_cache_memory": BESIDE_KV,
    }
    results: dict[str, Any] = {}
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(LLM(str(directory), **settings, **{"media.images": images}))
            for name, images in (("without", False), ("with", True))
        }
        found: dict[str, list[Any]] = {name: [] for name in engines}
        many: dict[str, list[float]] = {name: [] for name in engines}
        one: dict[str, list[float]] = {name: [] for name in engines}
        for run in range(BESIDE_RUNS + 1):
            order = [*engines] if run % 2 else [*reversed(engines)]
            for name in order:
                seconds, outputs = _text_run(engines[name], run)
                alone, _ = _text_run(engines[name], run, requests=1)  # of these, so it hits
                if run:  # the first warms up
                    many[name].append(seconds)
                    one[name].append(alone)
                    found[name].append(outputs)
        for name, engine in engines.items():
            results[name] = {
                "seconds": statistics.median(many[name]),
                "all_seconds": many[name],
                "one_s": statistics.median(one[name]),
                "cached_tokens": engine.engine.stats().cached_tokens,
            }
    results["tokens_equal"] = found["with"] == found["without"]
    results["with / without"] = {
        key: results["with"][key] / results["without"][key]
        for key in ("seconds", "one_s", "cached_tokens")
    }
    return results


def _text_run(llm: Any, seed: int, requests: int = BESIDE_REQUESTS) -> tuple[float, list[Any]]:
    """Return the seconds of requests of 100 to 1,024 tokens, half of which begin alike, and the
    tokens that they get."""
    import random

    from dovetail import SamplingParams

    numbers = random.Random(seed)
    shared = [numbers.randrange(FIRST_SPECIAL) for _ in range(512)]
    work = []
    for index in range(requests):
        own = [numbers.randrange(FIRST_SPECIAL) for _ in range(numbers.randint(100, 1024))]
        work.append({"prompt_token_ids": [*shared, *own[:512]] if index % 2 else own})
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=BESIDE_OUTPUT)
    begun = time.perf_counter()
    outputs = llm.generate(work, params, use_tqdm=False)
    seconds = time.perf_counter() - begun
    return seconds, [list(output.outputs[0].token_ids) for output in outputs]


def run_vllm(directory: Path) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    begun = time.perf_counter()
    llm = LLM(
        str(directory),
        load_format="dummy",
        dtype="bfloat16",
        max_num_seqs=REQUESTS,
        max_model_len=2048,
        limit_mm_per_prompt={"image": 1, "video": 0},
    )
    started = time.perf_counter() - begun

    def generate(work: list[dict[str, Any]], most: int) -> int:
        params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=most)
        outputs = llm.generate(work, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return {"start_s": started, **measured(generate, text=False)}


def run(engine: str, directory: Path) -> dict[str, Any]:
    """Run one engine; what it raised is its result."""
    try:
        if engine == "vllm":
            return run_vllm(directory)
        if engine == "beside":
            return run_beside(directory)
        return run_dovetail(directory, text=engine == "text")
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:2000]}"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ["dovetail", "text", "vllm", "beside"]
    parser.add_argument("--engine", nargs="+", default=["dovetail", "text"], choices=names)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(Path(directory))
        for engine in args.engine:
            results[engine] = apart(run, engine, Path(directory))
            print(engine, json.dumps(results[engine]), flush=True)
            if args.json:
                Path(args.json).write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
