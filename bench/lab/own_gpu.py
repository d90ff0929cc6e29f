"""Validates simulations against real runs: calibrates on this machine's GPU, runs other workloads
and policies on it, and simulates them.

    python -m bench.lab.own_gpu --out DIR                          # Qwen3-0.6B's shape: calibrate, run, compare
    python -m bench.lab.own_gpu --out DIR --shape qwen3-8b         # calibrate only
    python -m bench.lab.own_gpu --out DIR --shape all --cases      # calibrate every shape of bench/shapes.py: four minutes
    python -m bench.lab.own_gpu --out DIR --again                  # no GPU: fit anew what was measured, and compare the runs with it

Of what was measured the median over the real runs of a case counts, and of what was simulated the
median over as many seeds: a host has slow seconds.

Random weights in the model's true shape, bfloat16, the engine's defaults otherwise: overlap on,
prefix reuse on (nobody shares a prefix), blocks as the attention backend likes them. Calibration
sees its grid, and a short workload unlike these. A run's first seconds are not compared: kernels
are compiled then. The profiles that the lab ships are what this leaves: tar xzf DIR/own.tgz -C
apps/lab/dovetail_lab/profiles --wildcards 'h200-*.json'.

DIR gets one file, own.tgz, which every invocation adds to, after each stage: the profile, every
step that was sighted while it was measured, each run, real and simulated, and results.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench import host
from bench.lab.checks import Figure, print_figures
from dovetail_lab.metrics import measure, per_request
from dovetail_lab.records import RunResult
from dovetail_lab.simulate import replay
from dovetail_lab.step_profile import StepTimeProfile
from dovetail_lab.workloads import WorkloadOptions, load_workload

CASES_SHAPE = "qwen3-0.6b"  # the shape that the cases run on
SETTLING_S = 3.0  # of each run, not compared
WITHIN = 0.05
SEED = 1
PAPERS = {
    "name",
    "kv_tokens",
    "cache_groups",
    "request_s",
    "machine",
    "model",
    "engine",
    "source",
    "notes",
}  # of a profile: what isn't fitted


@dataclass(frozen=True, slots=True)
class Case:
    """A workload, without its duration, and a policy. The runs that are kept were measured before
    all policies had a `prefill_limit`: only `fcfs` had one."""

    workload: str
    scheduler: str | dict[str, Any]
    prefill_limit: float | None = None


CHAT = "prompt=lognormal(160, 1.0, most=2000) output=lognormal(130, 0.8, most=800) clients=8"
LONG = "prompt=lognormal(600, 0.9, most=6000) output=lognormal(120, 0.7, most=600) clients=8"
CASES = {
    "chat-fcfs": Case(f"arrivals=poisson(60) {CHAT}", "fcfs", 2.0),
    "bursts-sarathi": Case(f"arrivals=gamma(25, cv=2) {LONG}", "sarathi"),
    "chat-vtc": Case(f"arrivals=poisson(90) {CHAT}", "vtc"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--shape",
        default=CASES_SHAPE,
        help="of bench/shapes.py; all: each of them, one after the other",
    )
    parser.add_argument(
        "--cases",
        nargs="*",
        choices=CASES,
        help="default: the first two for qwen3-0.6b, none for others",
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of each real run")
    parser.add_argument("--runs", type=int, default=3, help="of each case")
    parser.add_argument(
        "--time-limit", type=float, default=46.0, help="time limit of the calibration in seconds"
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="measure nothing: fit and simulate what DIR/own.tgz holds",
    )
    args = parser.parse_args()
    shapes = known_shapes() if args.shape == "all" else [args.shape]
    held = [calibrated(shape, args) for shape in shapes]
    raise SystemExit(not all(held))


def known_shapes() -> list[str]:
    from bench.shapes import SHAPES

    return list(SHAPES)


def calibrated(shape: str, args: argparse.Namespace) -> bool:
    """Measure a shape, or refit earlier measurements, and compare the cases. Return True if all
    figures are within bounds."""
    cases = (
        args.cases if args.cases is not None else list(CASES)[:2] if shape == CASES_SHAPE else []
    )
    with tempfile.TemporaryDirectory() as model, tempfile.TemporaryDirectory() as folder:
        archive = Archive(args.out / "own.tgz", Path(folder))
        profile = archive.folder / f"h200-{shape}.json"
        if args.again:
            fit_anew(archive, shape, profile)
        else:
            measure_all(
                shape,
                Path(model),
                profile,
                [(name, turn) for turn in range(args.runs) for name in cases],
                args,
                archive,
            )
        holds = not cases or compare(archive.folder, profile, cases, args.seconds)
        archive.pack()
    return holds


@dataclass(frozen=True, slots=True)
class Archive:
    """A compressed file, and the folder that it is unpacked to if it is there already."""

    path: Path
    folder: Path

    def __post_init__(self) -> None:
        if self.path.exists():
            with tarfile.open(self.path) as packed:
                packed.extractall(self.folder, filter="data")

    def pack(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(self.path, "w:gz") as packed:
            for file in sorted(self.folder.iterdir()):
                packed.add(file, file.name)


def engine(model: str, scheduler: Any, prefill_limit: float | None = None) -> dict[str, Any]:
    sizes = {
        "prefill_limit": prefill_limit,
        "max_model_len": 16_384,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
    }
    return {
        "model": model,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "generation_config": "none",
        "scheduler": scheduler,
        **sizes,
    }


def trace_of(case: Case, seconds: float) -> Any:
    return load_workload(f"{case.workload} duration={seconds}", WorkloadOptions(seed=SEED))


def measure_all(
    shape: str,
    model: Path,
    profile: Path,
    runs: Sequence[tuple[str, int]],
    args: argparse.Namespace,
    archive: Archive,
) -> None:
    """Run the part that needs the GPU: calibrate, then run each case on the real engine."""
    import torch

    from bench.shapes import SHAPES, write_checkpoint
    from dovetail_lab.calibrate import calibrate

    write_checkpoint(SHAPES[shape], model)
    gc.collect()
    torch.cuda.empty_cache()
    print(host.told(), flush=True)
    begun = time.perf_counter()
    made = calibrate(
        engine(str(model), "fcfs", 2.0), name=profile.stem, time_limit_s=args.time_limit
    )
    named = {
        "model": f"{shape}'s shape, random weights, bfloat16",
        "source": "bench/lab/own_gpu.py",
    }
    made.profile.model_copy(update=named).save(profile)
    (archive.folder / f"sightings-{shape}.json").write_text(
        json.dumps([astuple(sighting) for sighting in made.sightings])
    )
    archive.pack()
    took = time.perf_counter() - begun
    print(
        f"calibrated in {took:.0f} s: off by {made.profile.error:.1%} ({made.profile.judged_on}); "
        f"all of the grid: {made.complete}",
        flush=True,
    )
    for name, _ in runs:
        for earlier in archive.folder.glob(f"{name}-real-*.json"):  # of another calibration
            earlier.unlink()
    for name, turn in runs:
        gc.collect()
        torch.cuda.empty_cache()
        begun = time.perf_counter()
        case = CASES[name]
        replay(
            engine(str(model), case.scheduler, case.prefill_limit),
            trace_of(case, args.seconds),
            name=name,
            seed=SEED,
        ).save(archive.folder / f"{name}-real-{turn}.json")
        archive.pack()
        print(f"{name}: ran in {time.perf_counter() - begun:.0f} s; {host.told()}", flush=True)


def fit_anew(archive: Archive, shape: str, profile: Path) -> None:
    """From the steps that were sighted."""
    from dovetail_lab.profile_fitting import profile_of
    from dovetail_lab.rig import Sighting
    from dovetail_lab.step_time import StepShape

    rows = json.loads((archive.folder / f"sightings-{shape}.json").read_text())
    sightings = [Sighting(StepShape(*own), *times) for own, *times in rows]
    made = profile_of(
        sightings, True, **StepTimeProfile.load(str(profile)).model_dump(include=PAPERS)
    )
    made.save(profile)
    print(f"fitted anew: off by {made.error:.1%} ({made.judged_on})")


def compare(out: Path, profile: Path, cases: list[str], seconds: float) -> bool:
    """Run the part that needs no GPU: simulate each case and compare it with the real run. Return
    True if all is within `WITHIN`. Ends the program if nothing was run."""
    results: dict[str, Any] = {
        "profile": StepTimeProfile.load(str(profile)).model_dump(mode="json"),
        "cases": {},
    }
    holds = True
    for name in cases:
        real = [RunResult.load(file) for file in sorted(out.glob(f"{name}-real-*.json"))]
        if not real:
            raise SystemExit(f"{name}: no real run of it is there to compare with")
        simulated = [
            simulate(CASES[name], real[0], profile, name, seconds, seed)
            for seed in range(SEED, SEED + len(real))
        ]
        for turn, run in enumerate(simulated):
            run.save(out / f"{name}-simulated-{turn}.json")
        figures = figures_of(simulated, real)
        holds &= print_figures(name, figures)
        for run in (*simulated, *real):
            print("   ", describe(run))
        results["cases"][name] = {
            "figures": {
                figure.name: [figure.simulated, figure.measured, figure.difference]
                for figure in figures
            },
            "simulated": [describe(run) for run in simulated],
            "measured": [describe(run) for run in real],
        }
    (out / "results.json").write_text(json.dumps(results, indent=1))
    return holds


def simulate(
    case: Case, real: RunResult, profile: Path, name: str, seconds: float, seed: int
) -> RunResult:
    pages = {"num_pages": real.settings["num_pages"]}
    config = {
        **engine("demo", case.scheduler, case.prefill_limit),
        "executor": {"name": "simulated", "step_time": str(profile), **pages},
    }
    return replay(
        config,
        trace_of(case, seconds),
        name=name,
        seed=seed,
        overrides={"block_size": real.settings["block_size"]},
    )


def figures_of(simulated: Sequence[RunResult], real: Sequence[RunResult]) -> list[Figure]:
    """Medians over runs."""
    figures = []
    for metric in ("ttft", "tpot", "e2e"):
        for percentile in (50, 99):
            pair = (
                float(np.median([settled_ms(run, metric, percentile) for run in runs]))
                for runs in (simulated, real)
            )
            figures.append(Figure(f"{metric.upper()} p{percentile}, ms", *pair, WITHIN))
    return figures


def settled_ms(run: RunResult, metric: str, percentile: float) -> float:
    times = per_request([record for record in run if record.arrival_s >= SETTLING_S], metric)
    return 1e3 * float(np.nanpercentile(times, percentile))


def describe(run: RunResult) -> dict[str, float]:
    """Return figures of a run that may explain a difference."""
    settled = run.timeline.time_s >= SETTLING_S
    prefills = run.timeline.prefill_tokens > 0
    device = 1e3 * run.timeline.device_s
    return {
        "completed": measure(run).completed,
        "steps": int(settled.sum()),
        "decode_step_ms": float(device[settled & ~prefills].mean()),
        "prefill_steps": int((settled & prefills).sum()),
        "prefill_step_ms": float(device[settled & prefills].mean()),
        "prefill_step_tokens": float(
            (run.timeline.prefill_tokens + run.timeline.decode_tokens)[settled & prefills].mean()
        ),
        "rows": float(run.timeline.running[settled].mean()),
        "gap_ms": 1e3 * float(np.median(np.diff(run.timeline.time_s[settled]))),
    }


if __name__ == "__main__":
    main()
