"""Texts embedded per second on one GPU, as a share of what the matrix units allow, beside the share
that long prompts of a generator reach.

    python -m bench.embeddings --engine dovetail vllm --json out.json
    python -m bench.embeddings --encoders                               # the shapes of three encoders, by the mean of all tokens

Qwen3-Embedding-0.6B's shape with random weights in bfloat16: 10,000 texts of 20 to 500 tokens,
given as token ids, by last token, normalized. One warm-up call, then three timed runs with fresh
ids each. `8b-prefill` of `bench/throughput.py` runs in the same call; the last line tells how the
two shares compare, and how the rate compares to vLLM's.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.apart import apart
from bench.engines import Measured, run_engine, settings_of, timed, version_of, warm_up
from bench.limits import floor_seconds, measure_limits, require_gpu
from bench.shapes import SHAPES, write_checkpoint
from bench.workloads import WORKLOADS, Workload

PREFILL = "8b-prefill"
# name -> transformers' class, and fields of its config
ENCODERS: dict[str, tuple[str, dict[str, int]]] = {
    "all-MiniLM-L6-v2": (
        "BertModel",
        {
            "hidden_size": 384,
            "num_hidden_layers": 6,
            "num_attention_heads": 12,
            "intermediate_size": 1536,
        },
    ),
    "bge-m3": (
        "XLMRobertaModel",
        {
            "vocab_size": 250_002,
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        }
        | {"max_position_embeddings": 8194},
    ),
    "ModernBERT-base": ("ModernBertModel", {}),
}


def texts(count: int) -> Workload:
    """Return the texts as a workload: one result of each."""
    rng = random.Random(0)
    return Workload(
        "qwen3-0.6b", tuple((rng.randint(20, 500), 1) for _ in range(count)), max_num_seqs=256
    )


def write_embedding_model(work: Workload, directory: Path) -> None:
    """Write a checkpoint without weights, with sentence-transformers' files."""
    shape = SHAPES[work.shape]
    write_checkpoint(shape, directory)
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (kind, path) in enumerate(paths.items())
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": shape.hidden, "pooling_mode_lasttoken": True})
    )


def write_encoder(architecture: str, fields: dict[str, int], directory: Path) -> None:
    """Write an encoder's checkpoint without weights; it pools by mean, the default."""
    import transformers

    config = getattr(transformers, architecture).config_class(
        architectures=[architecture], **fields
    )
    config.save_pretrained(directory)


def run_encoders(work: Workload, overrides: dict[str, Any]) -> None:
    for name, (architecture, fields) in ENCODERS.items():
        with tempfile.TemporaryDirectory() as folder:
            write_encoder(architecture, fields, Path(folder))
            measured: Measured = apart(run_dovetail, work, Path(folder), overrides)
        median = statistics.median(measured.seconds)
        busy = measured.details["device_busy_share"]
        rates = f"{len(work.lens) / median:,.0f} texts/s, {work.prompt_tokens / median:,.0f} tok/s"
        print(f"{name:>16}: {rates}, device busy {100 * busy:.0f} %", flush=True)


def run_dovetail(work: Workload, directory: Path, overrides: dict[str, Any]) -> Measured:
    from dovetail import LLM

    begun = time.perf_counter()
    settings = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_num_seqs": work.seqs,
        "max_model_len": work.longest,
    }
    with LLM(directory, **{**settings, **overrides}) as llm:
        started = time.perf_counter() - begun

        def embed(prompts: list[list[int]]) -> int:
            return sum(output.outputs is not None for output in llm.embed(prompts, use_tqdm=False))

        warm_up(work, embed)
        before = llm.engine.stats()
        times, power = timed(work, embed)
        stats = llm.engine.stats()
        busy = (stats.device_s - before.device_s) / sum(times)
        return Measured(
            times,
            started,
            {
                **llm.engine.capacity.details,
                "steps": stats.steps - before.steps,
                "device_busy_share": busy,
                **power,
            },
        )


def run_vllm(work: Workload, directory: Path, overrides: dict[str, Any]) -> Measured:
    from vllm import LLM

    begun = time.perf_counter()
    llm = LLM(
        str(directory),
        runner="pooling",
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=work.longest,
        max_num_seqs=work.seqs,
    )
    started = time.perf_counter() - begun

    def embed(prompts: list[list[int]]) -> int:
        return len(llm.embed([{"prompt_token_ids": prompt} for prompt in prompts], use_tqdm=False))

    warm_up(work, embed)
    times, power = timed(work, embed)
    return Measured(times, started, {"version": version_of("vllm"), **power})


ENGINES = {"dovetail": run_dovetail, "vllm": run_vllm}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", nargs="+", default=["dovetail"], choices=ENGINES)
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--no-prefill", action="store_true", help=f"leave out {PREFILL}")
    parser.add_argument("--encoders", action="store_true", help="measure encoders instead")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="further keys of engine.yaml"
    )
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    require_gpu()
    work = texts(args.texts)
    overrides = settings_of(args.set)
    rows = list[dict[str, Any]]()
    shares = dict[str, float]()
    rates = dict[str, float]()
    if args.encoders:
        run_encoders(work, overrides)
        return
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder, "embeds")
        prefill = WORKLOADS[PREFILL]
        write_embedding_model(work, directory)
        write_checkpoint(SHAPES[prefill.shape], Path(folder, "generates"))
        limits = {
            name: apart(measure_limits, SHAPES[one.shape])
            for name, one in (("embed", work), (PREFILL, prefill))
        }
        # no logits are computed
        headless = 2 * SHAPES[work.shape].head_weights * len(work.lens) / limits["embed"].flop_per_s
        floors = {"embed": floor_seconds(SHAPES[work.shape], work.lens, limits["embed"]) - headless}
        floors[PREFILL] = floor_seconds(SHAPES[prefill.shape], prefill.lens, limits[PREFILL])
        runs = [("embed", engine) for engine in args.engine] + (
            [] if args.no_prefill else [(PREFILL, "dovetail")]
        )
        for name, engine in runs:
            if name == "embed":
                measured: Measured | None = apart(ENGINES[engine], work, directory, overrides)
            else:
                measured = apart(run_engine, engine, prefill, Path(folder, "generates"), overrides)
            if measured is None:
                continue
            median = statistics.median(measured.seconds)
            share = floors[name] / median
            tokens = (work if name == "embed" else prefill).prompt_tokens
            (
                shares[name if name == PREFILL else engine],
                rates[name if name == PREFILL else engine],
            ) = share, tokens / median
            rows.append(
                {
                    "workload": name,
                    "engine": engine,
                    "seconds": measured.seconds,
                    "tok_s": tokens / median,
                    "share": share,
                    **measured.details,
                }
            )
            rows[-1] |= {
                "product_TFLOP_s": limits[name].flop_per_s / 1e12,
                "start_s": measured.start_s,
            }
            print(
                f"{name:>10} {engine:>9} {tokens / median:>11,.0f} tok/s {median:7.3f} s  "
                f"{100 * share:.0f} % of the products' rate",
                flush=True,
            )
    told = [
        f"{engine} / {other}: {rates[engine] / rates[other]:.2f}"
        for engine, other in (("dovetail", "vllm"),)
        if {engine, other} <= rates.keys()
    ]
    told += (
        [f"share / {PREFILL}'s: {shares['dovetail'] / shares[PREFILL]:.2f}"]
        if {"dovetail", PREFILL} <= shares.keys()
        else []
    )
    print("  ".join(told), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
