"""Measures the time from the start of a process to its first token, with the weights on disk.

    python -m bench.startup --json out.json
    python -m bench.startup --set executor.name=tensor --verbose     # over two ranks, with each one's stages

A random checkpoint of the model's true shape is written first, in safetensors; so the files lie in
the page cache when they are read. With `--set load_format=dummy` none is written, and weights are
drawn on the device. Runs are made with the compiled kernels of earlier runs on disk, as on a
machine that has served before, and, the first, without any.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import host
from bench.engines import settings_of
from bench.shapes import SHAPES, write_checkpoint, write_weights

CHILD = """
import json, logging, sys, time
if sys.argv[2:]:
    logging.basicConfig(format="    %(message)s")
    logging.getLogger("dovetail").setLevel(logging.DEBUG)
from dovetail import LLMEngine, SamplingParams
stages = {"importing dovetail": time.monotonic()}
def progress(what, done, total):
    stages[what] = time.monotonic()
settings = json.loads(sys.argv[1])
with LLMEngine.from_config({"model": settings.pop("model")}, progress=progress, **settings) as engine:
    stages["ready"] = time.monotonic()
    engine.add_request("first", list(range(1, 17)), SamplingParams(max_tokens=4, ignore_eos=True))
    while not engine.step():
        pass
    stages["first token"] = time.monotonic()
    print(json.dumps(stages), flush=True)
"""


def first_token(
    directory: Path, settings: dict[str, Any], kernels: Path, *, verbose: bool = False
) -> dict[str, float]:
    """Return the end of each stage, in seconds since the start of the process."""
    config = json.dumps({"model": str(directory), **settings})
    command = [sys.executable, "-c", CHILD, config, *(["verbose"] if verbose else [])]
    begun = time.monotonic()  # one clock for all processes of a machine
    child = subprocess.run(
        command,
        env={**os.environ, "TRITON_CACHE_DIR": str(kernels)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return {stage: at - begun for stage, at in json.loads(child.stdout.splitlines()[-1]).items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-0.6b", choices=SHAPES)
    parser.add_argument("--runs", type=int, default=3, help="after the first")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="keys of engine.yaml"
    )
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="show the engine's log, including the stages of each rank",
    )
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as kernels:
        write_checkpoint(SHAPES[args.shape], Path(name))
        settings = settings_of(args.set)
        weights = (
            "none"
            if settings.get("load_format") == "dummy"
            else f"{write_weights(Path(name)):.2f} GB, in the page cache"
        )
        print(f"weights on disk: {weights}; {host.told()}", flush=True)
        runs = []
        for run in range(1 + args.runs):
            stages = first_token(Path(name), settings, Path(kernels), verbose=args.verbose)
            runs.append(stages)
            print(
                "no kernels compiled" if run == 0 else "kernels compiled   ",
                "  ".join(f"{stage} {at:.2f} s" for stage, at in stages.items()),
                flush=True,
            )
    median = statistics.median(stages["first token"] for stages in runs[1:]) if args.runs else None
    print(
        f"first token after {runs[0]['first token']:.1f} s, later {median:.1f} s" if median else ""
    )
    if args.json:
        Path(args.json).write_text(
            json.dumps(
                {"shape": args.shape, "first": runs[0], "later": runs[1:], "median_s": median},
                indent=2,
            )
        )


if __name__ == "__main__":
    main()
