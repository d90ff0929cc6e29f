"""Dovetail beside vLLM: 21 workloads on two models, each engine on a GPU of its own at the same
time.

    python -m bench.beside --seconds 580 --json out.json
    python -m bench.beside --gpus 0 0 --only nano one     # one GPU: an engine after the other
    python -m bench.beside --engine dovetail --gpus 0     # one engine alone

An engine is started once for each model, with room for the longest request and for the most
requests of all workloads, and with its defaults otherwise. Random weights in the model's true
shape, bfloat16. In each workload some requests warm up; then each run has fresh token ids.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

from bench.engines import generator, timed, version_of, warm_up
from bench.everything import stop
from bench.limits import require_gpu
from bench.shapes import SHAPES, write_checkpoint
from bench.workloads import WORKLOADS, Workload

NANO = WORKLOADS["nano"]


def _small(*lens: tuple[int, int], **fields: Any) -> Workload:
    return Workload("qwen3-0.6b", lens, **fields)


def _large(*lens: tuple[int, int], **fields: Any) -> Workload:
    return Workload("qwen3-8b", lens, **fields)


def _nano(**fields: Any) -> Workload:
    return replace(NANO, warm=32, **fields)


# `warm`: enough requests that every kernel is compiled, few enough that the call ends in time.
WORKS = {
    "8b-64": replace(WORKLOADS["8b-64"], warm=8),
    "8b-256": replace(WORKLOADS["8b-256"], warm=32, runs=2),
    "8b-one": WORKLOADS["8b-one"],
    "8b-prefill": replace(WORKLOADS["8b-prefill"], warm=1),
    "8b-128": _large(*((600, 400),) * 128, warm=32),
    "8b-long": _large(*((16_000, 150),) * 32, warm=2, runs=2),
    "8b-eight": _large(*((200, 400),) * 8),
    "nano": replace(NANO, warm=64),
    "top-p": _nano(params={"top_p": 0.95, "top_k": 20}),
    "penalties": _nano(params={"presence_penalty": 1.5, "repetition_penalty": 1.05}),
    "logprobs": _nano(params={"logprobs": 5}),
    "greedy": _nano(temperature=0.0),
    "stop": _nano(params={"stop": ["</no such answer>"]}),
    "samples": _small(*((400, 400),) * 64, warm=16, params={"n": 4}),
    "long": replace(WORKLOADS["long"], warm=8),
    "prefix": _small(*((4000, 100),) * 256, shared_prefix=3000, warm=64),
    "32k": _small(*((32_000, 300),) * 4, warm=1),
    "sixteen": _small(*((200, 600),) * 16, warm=16),
    "one": WORKLOADS["one"],
    "eight": replace(WORKLOADS["eight"], warm=4),
    "thousand": replace(WORKLOADS["thousand"], warm=512),
}
# A seed of their own, or an engine would find prompts of the workload before in its prefix cache.
BESIDE = {
    name: replace(work, seed=1000 * number) for number, (name, work) in enumerate(WORKS.items())
}


@dataclass(frozen=True, slots=True)
class Engine:
    module: str  # its `LLM` and `SamplingParams` have the names and arguments of vLLM's
    distribution: str


ENGINES = {"dovetail": Engine("dovetail", "dovetail-llm"), "vllm": Engine("vllm", "vllm")}


def measure(engine: str, names: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the figures of workloads of one model, in one engine, as each ends."""
    api = import_module(ENGINES[engine].module)
    works = {name: BESIDE[name] for name in names}
    shape = next(iter(works.values())).shape
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(SHAPES[shape], Path(directory), None)
        begun = time.perf_counter()
        llm = api.LLM(
            directory,
            load_format="dummy",
            dtype="bfloat16",
            max_model_len=max(work.longest for work in works.values()),
            max_num_seqs=max(work.seqs * work.params.get("n", 1) for work in works.values()),
        )
        start_s = time.perf_counter() - begun
        for name, work in works.items():
            yield {
                "workload": name,
                "engine": engine,
                "version": version_of(ENGINES[engine].distribution),
                "start_s": start_s,
                **run(api, llm, work),
            }


def run(api: Any, llm: Any, work: Workload) -> dict[str, Any]:
    generate = generator(api, llm, work)
    warm_up(work, generate)
    seconds, power = timed(work, generate)
    median = statistics.median(seconds)
    return {
        "seconds": seconds,
        "median_s": median,
        "tok_s": work.params.get("n", 1) * work.output_tokens / median,
        **power,
    }


def models(names: list[str]) -> list[list[str]]:
    """`names` by their model, in the order of `BESIDE`."""
    shapes = dict.fromkeys(BESIDE[name].shape for name in BESIDE if name in names)
    return [
        [name for name in BESIDE if name in names and BESIDE[name].shape == shape]
        for shape in shapes
    ]


class Engines:
    """Runs engines in processes of their own, one for each model, and leaves none behind.

    Engines on one GPU run one after the other, each for `seconds` at most.
    """

    def __init__(self, seconds: float, out: Path) -> None:
        """`out`: beside it each engine has a file of JSON lines, one for each workload, and a file
        with its own output."""
        self._seconds = seconds
        self._out = out
        self._is_stopped = Event()
        self.failures: list[str] = []

    def run(self, gpus: dict[str, str], names: list[str]) -> list[dict[str, Any]]:
        """Return the rows of all engines. `gpus`: the GPU of each."""
        files = {engine: self._out.with_suffix(f".{engine}.jsonl") for engine in gpus}
        for file in files.values():
            file.unlink(missing_ok=True)
            file.with_suffix(".log").unlink(missing_ok=True)
        lanes: dict[str, list[str]] = {}
        for engine, gpu in gpus.items():
            lanes.setdefault(gpu, []).append(engine)
        with ThreadPoolExecutor(len(lanes)) as threads:
            try:
                done = [
                    threads.submit(self._lane, engines, gpu, names, files)
                    for gpu, engines in lanes.items()
                ]
                for one in done:
                    one.result()
            finally:
                self._is_stopped.set()
        lines = [file.read_text().splitlines() for file in files.values() if file.exists()]
        return [json.loads(line) for each in lines for line in each]

    def _lane(self, engines: list[str], gpu: str, names: list[str], files: dict[str, Path]) -> None:
        for engine in engines:
            deadline = time.monotonic() + self._seconds
            for group in models(names):
                self._model(engine, gpu, group, files[engine], deadline)

    def _model(self, engine: str, gpu: str, names: list[str], rows: Path, deadline: float) -> None:
        command = self.command(engine, names, rows)
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
        with rows.with_suffix(".log").open("ab") as log:
            process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
            try:
                while process.poll() is None:
                    if self._is_stopped.wait(0.2) or time.monotonic() > deadline:
                        self.failures.append(f"{engine} was ended before {names[-1]}: no time left")
                        return
            finally:
                stop(process)
            if process.returncode:
                why = f"ended with status {process.returncode}: see {rows.with_suffix('.log')}"
                self.failures.append(f"{engine} {why}")

    def command(self, engine: str, names: list[str], rows: Path) -> list[str]:
        program = [sys.executable, "-m", "bench.beside", "--child", "--json", str(rows)]
        return [*program, "--engine", engine, "--only", *names]


def visible(gpus: list[str]) -> list[str]:
    """`gpus`, of those that this program may use, as CUDA_VISIBLE_DEVICES has them. Exits if there
    is no such one."""
    if not (allowed := os.environ.get("CUDA_VISIBLE_DEVICES")):
        return gpus
    of_number = dict(zip(map(str, count()), allowed.split(","), strict=False))
    for gpu in gpus:
        if gpu not in of_number:
            raise SystemExit(f"--gpus {gpu}: CUDA_VISIBLE_DEVICES allows {allowed}, from 0 on")
    return [of_number[gpu] for gpu in gpus]


def table(rows: list[dict[str, Any]]) -> str:
    by_name: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_name.setdefault(row["workload"], {})[row["engine"]] = row
    lines = [f"{'':>10} {'dovetail':>22} {'vllm':>22}  ratio"]
    for name, engines in by_name.items():
        cells = [
            f"{engines[engine]['tok_s']:9,.0f} {engines[engine]['median_s']:8.3f} s "
            if engine in engines
            else " " * 20
            for engine in ENGINES
        ]
        ratio = (
            f"{engines['vllm']['median_s'] / engines['dovetail']['median_s']:.3f}"
            if len(engines) == len(ENGINES)
            else ""
        )
        lines.append(f"{name:>10} {cells[0]:>22} {cells[1]:>22}  {ratio}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--gpus", nargs="+", default=["0", "1"], help="one for each engine")
    parser.add_argument("--only", nargs="+", default=list(BESIDE), choices=BESIDE)
    parser.add_argument("--seconds", type=float, default=3600, help="limit of each engine")
    parser.add_argument("--json", default="beside.json", metavar="FILE")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        for row in measure(args.engine[0], args.only):
            with Path(args.json).open("a") as file:
                file.write(json.dumps(row) + "\n")
        return
    require_gpu()  # not in a child: vLLM forks, which it can't once CUDA is in use
    engines = list(dict.fromkeys(args.engine))
    if len(args.gpus) < len(engines):
        parser.error("--gpus: one for each of --engine")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    gpus = visible(args.gpus[: len(engines)])
    runs = Engines(args.seconds, Path(args.json))
    rows = runs.run(dict(zip(engines, gpus, strict=True)), args.only)
    Path(args.json).write_text(json.dumps(rows, indent=2))
    print(table(rows), flush=True)
    if runs.failures:
        raise SystemExit("\n".join(runs.failures))


if __name__ == "__main__":
    main()
