"""Runs the schemas of `bench/schemas.py` through an engine, alternating with plain text of the same
lengths: `bench/structured.py --schemas`."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.schemas import SCHEMAS, endless
from bench.workloads import Workload

PROMPT = 100
OUTPUT = 300

# prompts, and perhaps a schema -> the tokens, and more
Generate = Callable[[list[list[int]], dict[str, Any] | None], dict[str, float]]


@dataclass(frozen=True, slots=True)
class Plan:
    """`settings`: keys of `engine.yaml`. `demo`: use the demo model instead of random weights in a
    real shape, to test the program without a GPU."""

    directory: Path
    schemas: list[str]
    requests: list[int]
    grammar: str
    settings: dict[str, Any]
    json: str | None
    runs: int = 2  # of each, in turns, after one that isn't counted
    demo: bool = False

    @property
    def most(self) -> int:
        return max(self.requests)


@contextmanager
def dovetail(plan: Plan) -> Iterator[Generate]:
    from dovetail import LLM, SamplingParams, Structured

    settings: dict[str, Any] = {"grammar": plan.grammar, "max_num_seqs": plan.most, **plan.settings}
    if not plan.demo:
        settings = {"load_format": "dummy", "dtype": "bfloat16", "max_model_len": 1024, **settings}
    with LLM("demo" if plan.demo else plan.directory, **settings) as llm:

        def generate(prompts: list[list[int]], schema: dict[str, Any] | None) -> dict[str, float]:
            ruled: dict[str, Any] = (
                {"ignore_eos": True}
                if schema is None
                else {"structured": Structured(json_schema=schema)}
            )
            params = SamplingParams(temperature=0.6, max_tokens=OUTPUT, **ruled)
            before = llm.engine.stats()
            steps = before.steps
            device_s = before.device_s
            core_s = before.core_s
            outputs = [
                output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)
            ]
            wrong = [output for output in outputs if output.finish_reason != "length"]
            if wrong:
                raise RuntimeError(
                    f"{len(wrong)} answers ended by {wrong[0].finish_reason}: "
                    f"{wrong[0].stop_reason}: {wrong[0].text[:200]}"
                )
            stats = llm.engine.stats()
            steps = stats.steps - steps
            told = {
                "device_ms_a_step": 1e3 * (stats.device_s - device_s) / steps,
                "core_ms_a_step": 1e3 * (stats.core_s - core_s) / steps,
            }
            return {
                "tokens": sum(len(output.token_ids) for output in outputs),
                "steps": steps,
                **told,
            }

        yield generate


@contextmanager
def vllm(plan: Plan) -> Iterator[Generate]:
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    backend = {"backend": "guidance" if plan.grammar == "llguidance" else plan.grammar}
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": 1024,
        "max_num_seqs": plan.most,
    }
    llm = LLM(str(plan.directory), structured_outputs_config=backend, **settings)

    def generate(prompts: list[list[int]], schema: dict[str, Any] | None) -> dict[str, float]:
        ruled: dict[str, Any] = (
            {"ignore_eos": True}
            if schema is None
            else {"structured_outputs": StructuredOutputsParams(json=schema)}
        )
        params = SamplingParams(temperature=0.6, max_tokens=OUTPUT, **ruled)
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        return {"tokens": sum(len(output.outputs[0].token_ids) for output in outputs)}

    yield generate


ENGINES = {"dovetail": dovetail, "vllm": vllm}


def run(engine: str, plan: Plan) -> list[dict[str, Any]]:
    """Print and return a row for each schema and number of requests; unsupported schemas have an
    error."""
    rows: list[dict[str, Any]] = []
    with ENGINES[engine](plan) as generate:
        for requests in plan.requests:
            for name in plan.schemas:
                row = {
                    "engine": engine,
                    "schema": name,
                    "requests": requests,
                    **_in_turns(plan, generate, requests, endless(SCHEMAS[name])),
                }
                rows.append(row)
                print(_line(row), flush=True)
                if plan.json:
                    Path(plan.json).write_text(json.dumps(rows, indent=2))
    return rows


def _in_turns(
    plan: Plan, generate: Generate, requests: int, schema: dict[str, Any]
) -> dict[str, Any]:
    work = Workload(
        "qwen3-0.6b", ((PROMPT, OUTPUT),) * requests, max_id=1000 if plan.demo else 10_000
    )
    rates: dict[str, list[float]] = {"plain": [], "ruled": []}
    told: dict[str, Any] = {}
    try:
        for turn in range(plan.runs + 1):
            for way, rule in (("plain", None), ("ruled", schema)):
                prompts = work.prompts(seed=2 * turn + (rule is None))
                begun = time.perf_counter()
                told[way] = generate(prompts, rule)
                seconds = time.perf_counter() - begun
                rates[way].append(told[way]["tokens"] / seconds)
                told[way]["seconds"] = seconds
    except Exception as error:  # what an engine can't do is a result
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    plain, ruled = (statistics.median(rates[way][1:]) for way in ("plain", "ruled"))
    return {
        "plain_tok_s": plain,
        "tok_s": ruled,
        "share": ruled / plain,
        "rates": rates,
        "last": told,
    }


def _line(row: dict[str, Any]) -> str:
    head = f"{row['engine']:>8} {row['requests']:>4} x {row['schema']:<9}"
    if "error" in row:
        return f"{head} {row['error']}"
    first = row["rates"]["ruled"][0]
    return (
        f"{head} {row['tok_s']:9,.0f} of {row['plain_tok_s']:9,.0f} tok/s  "
        f"{100 * row['share']:5.1f} %  (the first time {first:,.0f})"
    )
