"""`compare`: compares policies on the same requests, with confidence intervals and a verdict in
words.

All policies get the same trace, seeds and predicted lengths, so requests can be paired.
`statistics` computes the intervals; `docs/lab/compare.md` explains them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set

import numpy as np

from dovetail.errors import ConfigError
from dovetail_lab.block_length import BlockLength, block_length
from dovetail_lab.draws import MIN_SEEDS, BlockDraws, SeedDraws
from dovetail_lab.metrics import itl_by_request, measure, per_request
from dovetail_lab.pairs import Pairs
from dovetail_lab.power import units_needed
from dovetail_lab.records import RequestRecord, RunResult
from dovetail_lab.statistics import Change, changes, half_of, scalar_change
from dovetail_lab.verdict import (
    LATENCIES,
    RATES,
    STATISTICS,
    Comparison,
    Line,
    Method,
    Sides,
    Versus,
)

# latencies with one value a request; inter-token latencies are a pool of all
PER_REQUEST = (
    "ttft",
    "tpot",
    "e2e",
)


def compare(
    runs: Mapping[str, Sequence[RunResult]],
    *,
    resamples: int = 2_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Comparison:
    """Compare all policies with the first. `runs[name]` has one run for each seed, in the same
    order for all.

    Raises `ConfigError` unless there are two policies or more, each with the same requests in each
    run.
    """
    if len(runs) < 2:
        raise ConfigError(f"a comparison needs two policies or more, got {len(runs)}")
    check_settings(confidence, resamples)
    (base, base_runs), *others = runs.items()
    for name, other_runs in others:
        check_same_requests(base, base_runs, name, other_runs)
    pairs = {
        name: {metric: paired(base_runs, other_runs, metric) for metric in LATENCIES}
        for name, other_runs in others
    }
    lengths = {
        (name, metric): [block_length(own, statistic) for statistic in STATISTICS]
        for name, metrics in pairs.items()
        for metric, own in metrics.items()
    }
    method = _method(
        list(runs.values()),
        [length for own in lengths.values() for length in own],
        resamples,
        confidence,
        seed,
    )
    versus = []
    for name, other_runs in others:
        of_blocks = isinstance(method.draws, BlockDraws)
        too_narrow = {
            metric
            for metric in LATENCIES
            if of_blocks and any(length.capped for length in lengths[name, metric])
        }
        versus.append(_versus(base, base_runs, name, other_runs, pairs[name], method, too_narrow))
    return Comparison(tuple(runs), tuple(run.seed for run in base_runs), method, tuple(versus))


def check_settings(confidence: float, resamples: int) -> None:
    """Raise `ConfigError` for an invalid confidence, or for too few resamples to find
    percentiles."""
    if not 0.5 <= confidence < 1:
        raise ConfigError(
            f"--confidence: expected at least 0.5 and less than 1, got {confidence:g}"
        )
    if resamples < 100:
        raise ConfigError(f"--resamples: expected 100 or more, got {resamples}")


def check_same_requests(
    base: str, base_runs: Sequence[RunResult], other: str, other_runs: Sequence[RunResult]
) -> None:
    """Raise `ConfigError`, naming the first difference, unless the runs have the same requests."""
    if not base_runs or len(base_runs) != len(other_runs):
        raise ConfigError(
            f"{base} has {len(base_runs)} runs and {other} {len(other_runs)}: a comparison pairs "
            f"run by run"
        )
    for a, b in zip(base_runs, other_runs, strict=True):
        if a.seed != b.seed:
            raise ConfigError(
                f"a run of {base} has seed {a.seed}, its counterpart of {other} seed {b.seed}"
            )
        if len(a) != len(b):
            raise ConfigError(
                f"{base} ran {len(a)} requests of {a.trace}, {other} ran {len(b)} of {b.trace}: "
                f"not the same trace"
            )
        for x, y in zip(a, b, strict=True):
            if _request(x) != _request(y):
                raise ConfigError(
                    f"seed {a.seed}: request {x.id} of {base} isn't request {y.id} of {other}: not "
                    f"the same trace, or prediction"
                )


def _request(record: RequestRecord) -> tuple[object, ...]:
    """Return the values that must be equal under all policies. Arrivals in a closed loop depend on
    the policy and are left out."""
    names = (
        "id",
        "client",
        "prompt_tokens",
        "true_tokens",
        "max_tokens",
        "predicted_tokens",
        "priority",
        "session",
        "waited",
    )
    times = () if record.waited else (record.arrival_s, record.deadline_s)
    return (*(getattr(record, name) for name in names), *times)


def paired(base: Sequence[RunResult], other: Sequence[RunResult], metric: str) -> list[Pairs]:
    """Pair each run's values, rounded to the nanosecond so that rounding errors of sums don't count
    as differences."""
    runs = list(zip(base, other, strict=True))
    if metric in PER_REQUEST:
        return [
            Pairs.of(*(np.round(per_request(side, metric), 9) for side in sides)) for sides in runs
        ]
    return [
        Pairs.pooled(*([np.round(own, 9) for own in itl_by_request(side)] for side in sides))
        for sides in runs
    ]


def _method(
    policies: Sequence[Sequence[RunResult]],
    lengths: Sequence[BlockLength],
    resamples: int,
    confidence: float,
    seed: int,
) -> Method:
    """Choose what to resample: whole runs if enough seeds have different traffic, otherwise blocks
    of consecutive requests."""
    runs = policies[0]
    level = f"{100 * confidence:g} % intervals: paired bootstrap, {resamples:,} resamples of "
    same_traffic = all(_traffic(run) == _traffic(runs[0]) for run in runs)
    if len(runs) >= MIN_SEEDS and not same_traffic:
        return Method(
            SeedDraws(len(runs), resamples, seed),
            confidence,
            f"{level}the {len(runs)} seeds' runs, each with traffic of its own",
            new_traffic=True,
        )
    length = max(length.requests for length in lengths)
    requests = min(len(run) for run in runs)
    draws = BlockDraws(length, requests, resamples, seed, same_traffic)
    new_traffic = runs[0].seeded and (len(runs) == 1 or not same_traffic)  # that of more seeds
    if same_traffic and len(runs) > 1:
        reason = f", because all {len(runs)} seeds replay the same arrivals and lengths"
    elif new_traffic:
        reason = (
            f", because {len(runs)} seed{'s are' if len(runs) > 1 else ' is'} too few to draw "
            f"among ({MIN_SEEDS} or more do)"
        )
    else:
        reason = ", because there is one run to draw from"
    block = (
        f"blocks of {length} consecutive requests"
        if length > 1
        else "single requests, which are uncorrelated"
    )
    says = f"{level}{block} ({draws.units} in a run){reason}"
    remedy = f"a longer trace, or --seeds {MIN_SEEDS} or more" if new_traffic else "a longer trace"
    warnings = {
        f"some latencies are correlated for too long for runs this short, so their intervals are "
        f"too narrow: use {remedy}": any(length.capped for length in lengths),
        "every seed gave the same runs: one would do": len(runs) > 1
        and all(_alike(run, of_policy[0]) for of_policy in policies for run in of_policy),
    }
    return Method(
        draws,
        confidence,
        says,
        tuple(warning for warning, applies in warnings.items() if applies),
        new_traffic,
    )


def _traffic(run: RunResult) -> list[tuple[float, int, int]]:
    return [(record.arrival_s, record.prompt_tokens, record.true_tokens) for record in run]


def _versus(
    base: str,
    base_runs: Sequence[RunResult],
    other: str,
    other_runs: Sequence[RunResult],
    pairs: Mapping[str, list[Pairs]],
    method: Method,
    too_narrow: Set[str],
) -> Versus:
    lines = []
    for metric, metric_pairs in pairs.items():
        found = changes(metric_pairs, STATISTICS, method.draws, method.confidence)
        lines += [
            Line(metric, statistic.name, change, metric not in too_narrow, _needs(change, method))
            for statistic, change in zip(STATISTICS, found, strict=True)
        ]
    measured = [[measure(run) for run in runs] for runs in (base_runs, other_runs)]
    for rate in RATES:
        a, b = (np.array([getattr(metrics, rate) for metrics in side]) for side in measured)
        change = scalar_change(a, b, method.draws, method.confidence)
        lines.append(Line(rate, "", change, needs=_needs(change, method)))
    return Versus(
        base,
        other,
        tuple(lines),
        requests=sum(map(len, base_runs)),
        completed=(
            sum(metrics.completed for metrics in measured[0]),
            sum(metrics.completed for metrics in measured[1]),
        ),
        compared=sum(len(pair.present) for pair in pairs["ttft"]),
        faster={metric: _sides(pairs[metric]) for metric in PER_REQUEST},
        identical=all(_alike(a, b) for a, b in zip(base_runs, other_runs, strict=True)),
    )


def _needs(change: Change, method: Method) -> float:
    """Return the sample size, as a multiple of the present number of units (runs or blocks), with
    which a change of the observed size would probably be measurable. The width of the interval
    gives the standard deviation of a unit's paired difference. NaN without an interval."""
    units = method.draws.units
    if not -1 < change.relative < math.inf or math.isnan(change.low) or change.low <= -1:
        return math.nan
    half = (math.log1p(change.high) - math.log1p(change.low)) / 2
    deviation = half / half_of(1.0, units, method.confidence)
    return units_needed(math.log1p(change.relative), deviation, method.confidence) / units


def _alike(a: RunResult, b: RunResult) -> bool:
    """Return True if every token of every request came at the same time."""
    return len(a) == len(b) and all(
        np.array_equal(x.token_times_s, y.token_times_s) and x.finish_reason == y.finish_reason
        for x, y in zip(a, b, strict=True)
    )


def _sides(pairs: Sequence[Pairs]) -> Sides:
    gained = np.concatenate([pair.a.numbers - pair.b.numbers for pair in pairs])
    return (
        Sides(float((gained > 0).mean()), float((gained < 0).mean()))
        if len(gained)
        else Sides(math.nan, math.nan)
    )
