"""A grid of engines and rates, with figures for each point. Results don't depend on the number of
processes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from dovetail.errors import ConfigError
from dovetail_lab.metrics import measure
from dovetail_lab.planned_runs import PlannedRun, run_all
from dovetail_lab.records import RunResult
from dovetail_lab.report.engine import Engine
from dovetail_lab.slo import Objective
from dovetail_lab.writing import as_csv

RATE = "scale_rate"  # axis of --rates, not a key of the engine
# seconds
LATENCIES = (
    "ttft_mean",
    "ttft_p50",
    "ttft_p99",
    "tpot_mean",
    "tpot_p99",
    "itl_p99",
    "e2e_mean",
    "e2e_p50",
    "e2e_p99",
)
COUNTS = (
    "requests",
    "completed",
    "rejected",
    "failed",
    "preemptions",
    "recomputed_tokens",
    "cached_tokens",
)
RATES = ("request_rate", "output_rate", "device_share", "acceptance_length", "tokens_per_step")
ARRIVALS = "arrival_rate"  # arriving requests per second, served or not


@dataclass(frozen=True, slots=True)
class Axis:
    """A key of the engine, and its values as texts."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GridPoint:
    """One point of the grid: a value for each axis, and the seed."""

    values: Mapping[str, str]
    seed: int


@dataclass(frozen=True, slots=True)
class GridResult:
    """Results at a point. `figures` are in seconds, counts, or per second; NaN if there was nothing
    to measure."""

    point: GridPoint
    figures: Mapping[str, float]
    engine: Engine


def parse_axis(text: str) -> Axis:
    """Parse `scheduler.aging_s=1,2,5`: commas inside brackets or quotes don't count. Raises
    `ConfigError`."""
    key, equals, values = text.partition("=")
    parts = tuple(part.strip() for part in _split(values))
    if not equals or not key.strip() or not all(parts):
        raise ConfigError(f"--set: expected key=value,value,…, got {text!r}")
    for part in parts:
        if parts.count(part) > 1:
            raise ConfigError(f"--set: {key.strip()}: {part} is given twice")
    return Axis(key.strip(), parts)


def _split(text: str) -> list[str]:
    """Split at commas outside of brackets and quotes."""
    parts = [""]
    depth = 0
    quote = ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        depth += 0 if quote else (character in "[{(") - (character in "]})")
        if character == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def grid(axes: Sequence[Axis], seeds: Sequence[int]) -> Iterator[GridPoint]:
    """Yield every combination, varying seeds fastest, then the last axis. Raises `ConfigError` if
    an axis is given twice."""
    keys = [axis.key for axis in axes]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"--set: {key} is given twice: write {key}=a,b")
    for values in itertools.product(*(axis.values for axis in axes)):
        for seed in seeds:
            yield GridPoint(dict(zip(keys, values, strict=True)), seed)


def sweep(
    jobs: Sequence[tuple[GridPoint, PlannedRun]],
    objectives: Sequence[Objective] = (),
    processes: int = 1,
) -> list[GridResult]:
    """Return a result for each planned run, in order. All are validated before the first starts."""
    for _, job in jobs:
        job.check()
    found = run_all(
        [job for _, job in jobs],
        partial(_measured, objectives=tuple(objectives)),
        processes,
        "sweep",
    )
    return [
        GridResult(point, values, engine)
        for (point, _), (values, engine) in zip(jobs, found, strict=True)
    ]


def _measured(run: RunResult, objectives: Sequence[Objective]) -> tuple[dict[str, float], Engine]:
    return figures(run, objectives), Engine.of(run.name, [run])


def figures(run: RunResult, objectives: Sequence[Objective] = ()) -> dict[str, float]:
    """Return a run's metrics. For each objective its value, infinite if too many requests were
    never served, and the share within its limit; then `slo_met`: 1 if all were met, otherwise 0."""
    metrics = measure(run)
    latencies = {}
    for name in LATENCIES:
        metric, _, statistic = name.partition("_")
        latencies[name] = metrics.latencies[metric].named(statistic)
    judged = {objective.name: objective.judge([run]) for objective in objectives}
    slo = {
        key: value
        for name, one in judged.items()
        for key, value in ((f"slo_{name}", one.value), (f"slo_{name}_within", one.share))
    }
    if judged:
        slo["slo_met"] = float(all(one.met for one in judged.values()))
    begin = 0.0 if run.window is None else run.window[0]
    span = max((record.arrival_s for record in run), default=begin) - begin
    arrivals = {ARRIVALS: (len(run) - 1) / span if span > 0 else math.nan}
    return {
        **{name: float(getattr(metrics, name)) for name in (*COUNTS, *RATES)},
        **arrivals,
        **latencies,
        **slo,
    }


def averaged(rows: Sequence[GridResult]) -> list[GridResult]:
    """Return the mean over seeds for each point of the grid, with the seed and engine of the
    first."""
    places: dict[tuple[str, ...], list[GridResult]] = {}
    for row in rows:
        places.setdefault(tuple(row.point.values.values()), []).append(row)
    means = (
        {name: float(np.mean([row.figures[name] for row in same])) for name in same[0].figures}
        for same in places.values()
    )
    return [
        GridResult(same[0].point, figures, same[0].engine)
        for same, figures in zip(places.values(), means, strict=True)
    ]


def table_of(results: Sequence[GridResult]) -> str:
    """Return CSV with a line for each run."""
    header = [*results[0].point.values, "seed", *results[0].figures] if results else []
    return as_csv(
        header,
        (
            [*one.point.values.values(), one.point.seed, *map(_cell, one.figures.values())]
            for one in results
        ),
    )


def _cell(value: float) -> float:
    """Write whole numbers without a decimal point."""
    return int(value) if value.is_integer() else value
