"""Measures the speed with no, half, and all of the requests deterministic.

    python -m bench.determinism [MODEL] [--requests 12] [--tokens 24] [--dtype float32]
    python -m bench.determinism --workload nano one 8b-64 --limit 600

The second form needs a GPU: random weights in the true shape of each workload's model, in bfloat16,
as `bench.throughput` measures. After `--limit` seconds the process ends, with the lines printed so
far. `dovetail doctor determinism MODEL` tries the promise itself.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from bench.engines import settings_of
from bench.limits import require_gpu
from bench.shapes import SHAPES, write_checkpoint
from bench.workloads import WORKLOADS, Workload
from dovetail import LLM, SamplingParams

# every how many requests one is deterministic; 0: none
SHARES = {"none": 0, "half": 2, "all": 1}


def speed(llm: LLM, prompts: Sequence[list[int]], tokens: Sequence[int], every: int) -> float:
    """Return the tokens per second of requests that arrive together, and generate so many `tokens`
    each. Each `every`th is deterministic, none with 0."""
    params = [
        SamplingParams(
            max_tokens=count,
            temperature=0.0,
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
    for share, every in SHARES.items():
        speed(llm, work.prompts(seed=1000), few, every)
        for number in range(rounds):
            found = speed(llm, work.prompts(seed=number), tokens, every)
            speeds[share].append(found)
        usual = median(speeds["none"])
        own = median(speeds[share])
        print(
            f"{name}, {share} deterministic: {own:,.0f} tok/s ({min(speeds[share]):,.0f} to "
            f"{max(speeds[share]):,.0f}), {100 * own / usual:.0f} % of as usual",
            flush=True,
        )


def end_after(seconds: float) -> None:
    """End the process after so many seconds, even in the middle of a measurement."""

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
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, help="instead of a model")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="further keys of engine.yaml"
    )
    asked = parser.parse_args()
    if asked.limit is not None:
        end_after(asked.limit)
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
