"""Measures the speed of deterministic requests, and of requests as usual.

    python -m bench.determinism [MODEL] [--requests 12] [--tokens 24] [--dtype float32]

`dovetail doctor determinism MODEL` tries the promise itself.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

from dovetail import LLM, SamplingParams


def speed(llm: LLM, requests: int, tokens: int, *, deterministic: bool) -> float:
    """Return the tokens per second of greedy requests that arrive together."""
    params = SamplingParams(
        max_tokens=tokens, temperature=0.0, ignore_eos=True, deterministic=deterministic
    )
    prompts = [f"The request with the number {number}:" for number in range(requests)]
    begun = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return requests * tokens / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    found: dict[bool, list[float]] = {False: [], True: []}
    with LLM(asked.model, dtype=asked.dtype, max_num_seqs=asked.requests) as llm:
        speed(llm, asked.requests, 2, deterministic=False)
        for _ in range(asked.rounds):
            for marked, speeds in found.items():
                speeds.append(speed(llm, asked.requests, asked.tokens, deterministic=marked))
    for marked, speeds in found.items():
        name = "deterministic" if marked else "as usual"
        print(f"{name}: {median(speeds):.0f} tok/s ({min(speeds):.0f} to {max(speeds):.0f})")


if __name__ == "__main__":
    main()
