"""Measures the speed with no, half, and all of the requests deterministic.

    python -m bench.determinism [MODEL] [--requests 12] [--tokens 24] [--dtype float32]
    python -m bench.determinism --workload nano one 8b-64 --limit 600
    python -m bench.determinism --workload nano --certain
    python -m bench.determinism --workload nano --ladder 8 8,1,64 8,64 --lines 32 256 --rounds 1

The second form needs a GPU: random weights in the true shape of each workload's model, in bfloat16,
as `bench.throughput` measures. Such a model is never sure of a token, so rounding changes more
tokens than with real weights; with `--certain` its layers add little to the embeddings, whose
numbers the output layer has, too, and hardly any token changes. After `--limit` seconds the process
ends, with the lines printed so far. The last starts an engine for each ladder of slabs of a
forward, the first of which is the reference, and for each number of lines that are sampled
together. Each line is followed by what steps took that check windows, and other steps, and by how
many provisional tokens were right. `dovetail doctor determinism MODEL` tries the promise itself.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from bench.engines import settings_of
from bench.limits import require_gpu
from bench.shapes import SHAPES, write_checkpoint
from bench.workloads import WORKLOADS, Workload
from dovetail import LLM, SamplingParams
from dovetail.api.observer import Observer, StepFinished
from dovetail.nn import weights
from dovetail.nn.weights import random_numbers
from dovetail_executors.runtime import slabs

# every how many requests one is deterministic; 0: none
SHARES = {"none": 0, "half": 2, "all": 1}


class StepTimes(Observer):
    """Records how long each step takes, and tells the steps that check drafts from the others."""

    def __init__(self) -> None:
        self.steps: list[StepFinished] = []

    def on_step(self, event: StepFinished) -> None:
        self.steps.append(event)

    def __str__(self) -> str:
        """Medians of the time on the device, of the idle time before it, and of the host's core."""
        before = [0.0, *(step.ended for step in self.steps)]
        pairs = list(zip(self.steps, before, strict=False))[1:]
        told = []
        for what, checks in (("check", True), ("other", False)):
            chosen = [each for each in pairs if (each[0].draft_rows > 0) == checks]
            if not chosen:
                continue
            device = median(1000 * (step.ended - step.started) for step, _ in chosen)
            idle = median(1000 * max(0.0, step.started - ended) for step, ended in chosen)
            core = median(1000 * step.core_s for step, _ in chosen)
            rows = median(step.draft_rows for step, _ in chosen)
            told.append(
                f"{len(chosen)} {what} steps of {rows:.0f} windows: {device:.2f} ms on the device, "
                f"{idle:.2f} idle before, {core:.2f} in the core"
            )
        drafts = sum(step.draft_tokens for step in self.steps)
        if drafts:
            right = sum(sum(step.accepted_drafts) for step in self.steps)
            told.append(f"{right:,} of {drafts:,} provisional tokens were right")
        return "; ".join(told)


def speed(
    llm: LLM,
    prompts: Sequence[list[int]],
    tokens: Sequence[int],
    every: int,
    temperature: float,
) -> float:
    """Return the tokens per second of requests that arrive together, and generate so many `tokens`
    each. Each `every`th is deterministic, none with 0."""
    params = [
        SamplingParams(
            max_tokens=count,
            temperature=temperature,
            seed=index,
            ignore_eos=True,
            deterministic=every > 0 and index % every == 0,
        )
        for index, count in enumerate(tokens)
    ]
    begun = time.perf_counter()
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    seconds = time.perf_counter() - begun
    produced = sum(len(output.outputs[0].token_ids) for output in outputs)
    if produced != sum(tokens):
        raise SystemExit(f"{produced} tokens were generated, not {sum(tokens)}")
    return produced / seconds


def measure(name: str, llm: LLM, work: Workload, rounds: int) -> None:
    """Print the speed for each share, in turn, as each is known. The first round of each share is a
    warm-up, with fewer tokens."""
    tokens = [out for _, out in work.lens]
    few = [min(out, 40) for out in tokens]
    speeds: dict[str, list[float]] = {share: [] for share in SHARES}
    times = StepTimes()
    llm.engine.core.observers.add("times", times)
    for share, every in SHARES.items():
        speed(llm, work.prompts(seed=1000), few, every, work.temperature)
        times.steps.clear()
        for number in range(rounds):
            found = speed(llm, work.prompts(seed=number), tokens, every, work.temperature)
            speeds[share].append(found)
        usual = median(speeds["none"])
        own = median(speeds[share])
        print(
            f"{name}, {share} deterministic: {own:,.0f} tok/s ({min(speeds[share]):,.0f} to "
            f"{max(speeds[share]):,.0f}), {100 * own / usual:.0f} % of as usual",
            flush=True,
        )
        print(f"    {times}", flush=True)
    llm.engine.core.observers.remove(times)


def numbers(text: str) -> tuple[int, ...]:
    """Return comma-separated numbers."""
    return tuple(int(each) for each in text.split(","))


def choose(ladder: tuple[int, ...], lines: int) -> None:
    """Let engines that start from now on compute slabs and lines by these sizes, on any device, and
    print them; () and 0: as they are."""
    for device in ("cpu", "cuda"):
        if ladder:
            slabs.PLACES[device], slabs.MORE_PLACES[device] = ladder[0], ladder[1:]
            print(f"{device}: forwards of {', '.join(map(str, ladder))} slabs", flush=True)
        if lines:
            slabs.LINES[device] = lines
            print(f"{device}: {lines} lines", flush=True)


def certain(shape: Sequence[int], name: str, *others: Any) -> torch.Tensor:
    """Do as `weights.random_numbers`, but let layers add little to the residual stream, and the
    output layer have the numbers of the embeddings."""
    name = name.replace("lm_head.weight", "model.embed_tokens.weight")
    numbers = random_numbers(shape, name, *others)
    return numbers.mul_(0.001) if name.endswith(("o_proj.weight", "down_proj.weight")) else numbers


def end_after(seconds: float) -> None:
    """Start a timer that ends the process after `seconds`, even during a measurement."""

    def end() -> None:
        print(f"ended after {seconds:.0f} s", flush=True)
        os._exit(124)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--prompt", type=int, default=20, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, help="seconds after which the process ends")
    parser.add_argument(
        "--ladder",
        nargs="+",
        type=numbers,
        default=[()],
        metavar="N,N,…",
        help="numbers of slabs of a forward, the reference first",
    )
    parser.add_argument("--lines", nargs="+", type=int, default=[0], help="sampled together")
    parser.add_argument(
        "--certain", action="store_true", help="weights that rounding hardly changes"
    )
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, help="instead of a model")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="further keys of engine.yaml"
    )
    asked = parser.parse_args()
    if asked.limit is not None:
        end_after(asked.limit)
    with patch.object(weights, "random_numbers", certain) if asked.certain else nullcontext():
        for ladder in asked.ladder:
            for lines in asked.lines:
                choose(ladder, lines)
                measure_all(asked)


def measure_all(asked: argparse.Namespace) -> None:
    """Start the engines that were asked for, and print their speeds."""
    settings = settings_of(asked.set)
    if asked.workload is None:
        lens = ((asked.prompt, asked.tokens),) * asked.requests
        with LLM(
            asked.model, **{"dtype": asked.dtype, "max_num_seqs": asked.requests, **settings}
        ) as llm:
            most = llm.engine.capacity.vocab_size - 1
            measure(str(asked.model), llm, Workload("", lens, max_id=most), asked.rounds)
        return
    require_gpu()
    for name in asked.workload:
        work = WORKLOADS[name]
        of_work = {
            "load_format": "dummy",
            "dtype": "bfloat16",
            "max_num_seqs": work.seqs,
            "max_model_len": work.longest,
        }
        with tempfile.TemporaryDirectory() as directory:
            write_checkpoint(SHAPES[work.shape], Path(directory), None)
            with LLM(directory, **{**of_work, **settings}) as llm:
                measure(name, llm, work, asked.rounds)


if __name__ == "__main__":
    main()
