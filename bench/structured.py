"""Tokens per second with a grammar in all, one or none of the requests, in one run; and the time
from a new grammar to its first mask.

    python -m bench.structured --tokenizer DIRECTORY                        # of a model: tokenizer.json and tokenizer_config.json, such as Qwen3's
    python -m bench.structured --tokenizer DIRECTORY --grammar llguidance --json out.json
    python -m bench.structured --tokenizer DIRECTORY --schemas --engine dovetail vllm             # ten schemas as people write them
    python -m bench.structured --schemas tags call --requests 8 --demo                            # the program without a GPU

256 requests of 200 tokens in and 300 out, on random weights in a model's true shape. A list of
objects with strings, numbers, lists and a pattern, which isn't over before 300 tokens; the same
lengths without a grammar. Medians of three runs with fresh prompts. With `--schemas`: each of
`bench/schemas.py` in 1, 64 and 256 requests of 100 tokens in and 300 out, beside as many without a
rule, in turns.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.apart import apart
from bench.engines import settings_of, timed, warm_up
from bench.limits import require_gpu
from bench.schema_runs import ENGINES, Plan
from bench.schema_runs import run as run_apart
from bench.schemas import SCHEMAS
from bench.shapes import SHAPES, write_checkpoint
from bench.workloads import Workload
from dovetail.front.tokenizer import Tokenizer

REQUESTS = 256
PROMPT = 200
OUTPUT = 300
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def schema(variant: int = 0) -> dict[str, Any]:
    """Return an uncached grammar for each variant."""
    item = {
        "type": "object",
        "properties": {
            f"name{variant}": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "score": {"type": "number"},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
            "code": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
        },
        "required": [f"name{variant}", "age", "score", "tags", "code"],
        "additionalProperties": False,
    }
    return {"type": "array", "items": item, "minItems": 100}


def run(directory: Path, grammar: str, settings: dict[str, Any]) -> dict[str, Any]:
    from dovetail import LLM, SamplingParams, Structured

    work = Workload("qwen3-0.6b", ((PROMPT, OUTPUT),) * REQUESTS)
    ways = {"none": 0, "one": 1, "all": REQUESTS}
    common: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_num_seqs": REQUESTS,
        "max_model_len": 1024,
    }
    row: dict[str, Any] = {"grammar": grammar}
    with LLM(directory, grammar=grammar, **{**common, **settings}) as llm:
        free = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=OUTPUT)
        ruled = SamplingParams(
            temperature=0.6, max_tokens=OUTPUT, structured=Structured(json_schema=schema())
        )
        for name, count in ways.items():
            params = [ruled] * count + [free] * (REQUESTS - count)

            def generate(prompts: list[list[int]], params: list[SamplingParams] = params) -> int:
                outputs = llm.generate(prompts, params, use_tqdm=False)
                wrong = [
                    output.outputs[0]
                    for output in outputs
                    if output.outputs[0].finish_reason != "length"
                ]
                if wrong:
                    raise SystemExit(
                        f"an answer ended by {wrong[0].finish_reason}: {wrong[0].stop_reason}: "
                        f"{wrong[0].text[:200]}"
                    )
                return sum(len(output.outputs[0].token_ids) for output in outputs)

            warm_up(work, generate)
            before = llm.engine.stats()
            times, power = timed(work, generate)
            stats = llm.engine.stats()
            steps = stats.steps - before.steps
            row[name] = {
                "tok_s": REQUESTS * OUTPUT / statistics.median(times),
                "seconds": times,
                "device_ms_a_step": 1e3 * (stats.device_s - before.device_s) / steps,
                "core_ms_a_step": 1e3 * (stats.core_s - before.core_s) / steps,
                "wall_ms_a_step": 1e3 * sum(times) / steps,
                **power,
            }
        row["first_token_ms"] = first_tokens(llm)
    return row


def first_tokens(llm: Any) -> dict[str, float]:
    """Milliseconds to the first token of requests one after the other: without a grammar, and with
    one that is new each time."""
    from dovetail import SamplingParams, Structured

    def first(variant: int | None) -> float:
        rule = {} if variant is None else {"structured": Structured(json_schema=schema(variant))}
        begun = time.perf_counter()
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1, **rule), use_tqdm=False)
        return 1e3 * (time.perf_counter() - begun)

    for _ in range(20):
        first(None)
    free = [first(None) for _ in range(100)]
    new = [first(1 + index) for index in range(100)]
    return {
        "free_p50": float(np.percentile(free, 50)),
        **{f"new_p{share}": float(np.percentile(new, share)) for share in (50, 99)},
    }


def run_schemas(args: argparse.Namespace, directory: Path) -> None:
    for engine in args.engine:
        file = None if args.json is None else f"{args.json.removesuffix('.json')}-{engine}.json"
        plan = Plan(
            directory,
            args.schemas or list(SCHEMAS),
            args.requests,
            args.grammar[0],
            settings_of(args.set),
            file,
            args.runs,
            args.demo,
        )
        rows = [row for row in apart(run_apart, engine, plan) if "error" not in row]
        for requests in args.requests:
            worst = min(
                (row for row in rows if row["requests"] == requests),
                key=lambda row: row["share"],
                default=None,
            )
            if worst is not None:
                print(
                    f"{engine}: {requests} requests: the worst is {worst['schema']} with "
                    f"{100 * worst['share']:.1f} %",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIRECTORY",
        help="tokenizer of a model with at most 151,936 token ids",
    )
    parser.add_argument("--grammar", nargs="+", default=["llguidance"])
    parser.add_argument("--schemas", nargs="*", choices=SCHEMAS, help="all, if none is named")
    parser.add_argument(
        "--requests",
        nargs="+",
        type=int,
        default=[1, 64, 256],
        help="numbers of concurrent requests, with --schemas",
    )
    parser.add_argument(
        "--engine", nargs="+", default=["dovetail"], choices=ENGINES, help="with --schemas"
    )
    parser.add_argument(
        "--runs",
        type=int,
        default=2,
        help="runs per schema, with --schemas, after an uncounted one",
    )
    parser.add_argument(
        "--demo",
        action="store_true",
        help="use the demo model, with --schemas, to test the program",
    )
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="further keys of engine.yaml"
    )
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if args.demo and args.schemas is not None:
        run_schemas(args, Path())
        return
    require_gpu()
    if args.tokenizer is None:
        parser.error("--tokenizer DIRECTORY is needed")
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(SHAPES["qwen3-0.6b"], Path(directory))
        for name in TOKENIZER_FILES:
            shutil.copy(args.tokenizer / name, directory)
        end = {
            "eos_token_id": Tokenizer.load(args.tokenizer).own.eos_token_id
        }  # as real models have one
        (Path(directory) / "generation_config.json").write_text(json.dumps(end))
        if args.schemas is not None:
            run_schemas(args, Path(directory))
            return
        for grammar in args.grammar:
            row = apart(run, Path(directory), grammar, settings_of(args.set))
            rows.append(row)
            for way in ("none", "one", "all"):
                told = row[way]
                share = 100 * told["tok_s"] / row["none"]["tok_s"]
                steps = ", ".join(
                    f"{key}={told[key]:.3g}"
                    for key in ("device_ms_a_step", "core_ms_a_step", "wall_ms_a_step")
                )
                print(
                    f"{grammar}: {way:4} with a grammar {told['tok_s']:10,.0f} tok/s ({share:.1f} "
                    f"%)  {steps}"
                )
            print(f"{grammar}: first token, ms: {row['first_token_ms']}", flush=True)
            if args.json:
                Path(args.json).write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
