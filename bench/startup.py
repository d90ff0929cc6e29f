"""Measures the time from the start of a process until its engine is ready, and to its first token.

    python -m bench.startup --json out.json
    python -m bench.startup --set executor.name=tensor --verbose     # over two ranks, with each one's stages

A random checkpoint of the model's true shape is written first, in safetensors; so the files lie in
the page cache when they are read. With `--set load_format=dummy` none is written, and weights are
drawn on the device.

The first run is cold: nothing is kept by an earlier start, neither compiled kernels nor the config.
The others are second starts, which find both. In all of them packages have bytecode, as pip leaves
them: it is compiled first, into a folder of its own, where an environment lacks it.
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
from typing import Any, NamedTuple

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
    phases = engine.capacity.details["start"]
    engine.add_request("first", list(range(1, 17)), SamplingParams(max_tokens=4, ignore_eos=True))
    while not engine.step():
        pass
    stages["first token"] = time.monotonic()
    print(json.dumps({"stages": stages, "phases": phases}), flush=True)
"""


class Start(NamedTuple):
    """`Start` holds the times of one start of an engine."""

    stages: dict[str, float]  # ends of stages, in seconds since the start of the process
    phases: str  # of the engine: see `dovetail.api.start_phases`


IMPORTS = """
import torch, triton.compiler, transformers.models.auto.modeling_auto
import dovetail.front.llm_engine, dovetail_executors.local, dovetail_executors.tensor
import dovetail_attention.triton_backend, dovetail_attention.triton_prefill_hopper
import dovetail_models.qwen3_moe, dovetail_models.qwen3_next, dovetail_samplers
"""


def environment(kept: Path) -> dict[str, str]:
    """Return the environment of processes that keep kernels, configs and bytecode in a folder."""
    own = {
        "TRITON_CACHE_DIR": str(kept / "kernels"),
        "XDG_CACHE_HOME": str(kept / "cache"),
        "PYTHONPYCACHEPREFIX": str(kept / "bytecode"),
    }
    return {**os.environ, **own, "PYTHONDONTWRITEBYTECODE": ""}


def compile_bytecode(kept: Path) -> None:
    """Compile the bytecode of what a start imports."""
    subprocess.run([sys.executable, "-c", IMPORTS], env=environment(kept), check=True)


def first_token(
    directory: Path, settings: dict[str, Any], kept: Path, *, verbose: bool = False
) -> Start:
    """Start an engine in a process of its own, and generate a token. `kept`: see `environment`."""
    config = json.dumps({"model": str(directory), **settings})
    command = [sys.executable, "-c", CHILD, config, *(["verbose"] if verbose else [])]
    begun = time.monotonic()  # one clock for all processes of a machine
    child = subprocess.run(
        command, env=environment(kept), stdout=subprocess.PIPE, text=True, check=True
    )
    told = json.loads(child.stdout.splitlines()[-1])
    return Start({stage: at - begun for stage, at in told["stages"].items()}, told["phases"])


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
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as kept:
        compile_bytecode(Path(kept))
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
            start = first_token(Path(name), settings, Path(kept), verbose=args.verbose)
            runs.append(start.stages)
            print(
                "cold        " if run == 0 else "second start",
                "  ".join(f"{stage} {at:.2f} s" for stage, at in start.stages.items()),
                flush=True,
            )
            print(f"             of the engine: {start.phases}", flush=True)
    medians = {
        stage: statistics.median(stages[stage] for stages in runs[1:]) if args.runs else None
        for stage in ("ready", "first token")
    }
    for stage, median in medians.items():
        later = "" if median is None else f", later {median:.1f} s"
        print(f"{stage} after {runs[0][stage]:.1f} s{later}")
    if args.json:
        Path(args.json).write_text(
            json.dumps(
                {"shape": args.shape, "first": runs[0], "later": runs[1:], "medians": medians},
                indent=2,
            )
        )


if __name__ == "__main__":
    main()
