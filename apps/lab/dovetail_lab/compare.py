"""`compare`: compares policies on the same requests, with confidence intervals and a verdict in
words.

All policies get the same trace, seeds and predicted lengths, so requests can be paired.
`statistics` computes the intervals; `docs/lab/compare.md` explains them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from dovetail.errors import ConfigError
from dovetail_lab.block_length import BlockLength, block_length
from dovetail_lab.digits import MISSING, evenly
from dovetail_lab.draws import MIN_SEEDS, BlockDraws, Draws, SeedDraws
from dovetail_lab.metrics import itl_by_request, measure, per_request
from dovetail_lab.pairs import MEAN, P50, P90, P99, Pairs
from dovetail_lab.power import units_needed
from dovetail_lab.records import RequestRecord, RunResult
from dovetail_lab.statistics import Change, changes, half_of, scalar_change

LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"}
# latencies with one value a request; inter-token latencies are a pool of all
PER_REQUEST = (
    "ttft",
    "tpot",
    "e2e",
)
STATISTICS = (MEAN, P50, P90, P99)
RATES = {
    "output_rate": "output tokens/s",
    "request_rate": "requests/s",
}  # metrics with one number a run; more is better
CLEARLY = 0.01  # by which a change must exceed others to be the largest


@dataclass(frozen=True, slots=True)
class Method:
    """Method of the intervals."""

    draws: Draws
    confidence: float
    says: str  # the method in words
    warnings: tuple[str, ...] = ()
    new_traffic: bool = False  # True if further seeds would bring traffic of their own


@dataclass(frozen=True, slots=True)
class Line:
    """One statistic of one metric; latencies in seconds."""

    metric: str
    statistic: str  # "" if the metric is one number a run
    change: Change
    # False: the interval is known to be too narrow, so excluding zero proves nothing
    holds: bool = True
    # sample size that a change of this size needs, as a multiple of the present one; NaN: unknown
    needs: float = math.nan

    @property
    def measurable(self) -> bool:
        """True if the interval excludes zero and isn't known to be too narrow."""
        return self.holds and self.change.measurable

    @property
    def better(self) -> bool | None:
        """True for an improvement, False for a regression, None if there is no measurable
        difference."""
        return (self.change.relative < 0) == (self.metric in LATENCIES) if self.measurable else None

    @property
    def outcome(self) -> str:
        """The outcome as a phrase."""
        if math.isnan(self.change.low):
            return "no interval"
        if self.change.measurable and not self.holds:
            return "runs too short to tell"
        return {True: "better", False: "worse", None: "no measurable difference"}[self.better]

    def would_tell(self, method: Method, seeds: int) -> str:
        """Return the sample size with which a change of this size would probably be measurable, in
        words: "34 seeds", or "2.5 times as long a trace". Empty if it is measurable already, or
        if the size is unknown or infinite."""
        if self.measurable or not math.isfinite(self.needs):
            return ""
        if method.new_traffic:
            return f"{math.ceil(self.needs * seeds):,} seeds"
        return f"{self.needs:.1f} times as long a trace"

    @property
    def size(self) -> float:
        """The size of the change as |log(after / before)|: halving is as large as doubling."""
        return abs(math.log1p(self.change.relative)) if self.change.relative > -1 else math.inf

    @property
    def label(self) -> str:
        return (
            f"{self.statistic} {LATENCIES[self.metric]}"
            if self.metric in LATENCIES
            else RATES[self.metric]
        )

    @property
    def finding(self) -> str:
        """The change in words: "cuts p99 TTFT by 31 % [27, 35]", or, if large, "makes p99 TTFT 3.1
        times as much [2.8, 3.4]"."""
        change = self.change
        if change.relative >= 0.995:
            # an end near 1 mustn't be shown as 1, nor below as 0
            digits = 2 if change.low >= 0.05 else 3
            return (
                f"makes {self.label} {1 + change.relative:.{digits}g} times as much "
                f"[{1 + change.low:.{digits}g}, {1 + change.high:.{digits}g}]"
            )
        verb, low, high = (
            ("cuts", -change.high, -change.low)
            if change.relative < 0
            else ("raises", change.low, change.high)
        )
        digits = 0 if abs(change.relative) >= 0.1 and min(abs(low), abs(high)) >= 0.005 else 1
        return (
            f"{verb} {self.label} by {100 * abs(change.relative):.{digits}f} % "
            f"[{100 * low:.{digits}f}, {100 * high:.{digits}f}]"
        )

    @property
    def direction(self) -> str:
        """The change in words, without its size: "cuts p99 TTFT"."""
        return f"{'cuts' if self.change.relative < 0 else 'raises'} {self.label}"

    @property
    def bare(self) -> str:
        """The change without an interval: "p99 TTFT +31.0 %"."""
        return (
            f"{self.label} "
            f"{f'{100 * self.change.relative:+.1f} %' if math.isfinite(self.change.relative) else 'from nothing'}"
        )


class Sides(NamedTuple):
    """Shares of the requests completed by both for which `other` is quicker or slower; the rest are
    equal. NaN without such requests."""

    quicker: float
    slower: float


@dataclass(frozen=True, slots=True)
class Versus:
    """The comparison of `other` with `base`. Latencies cover the requests that both completed."""

    base: str
    other: str
    lines: tuple[Line, ...]
    requests: int  # over all seeds
    completed: tuple[int, int]  # by base, by other
    compared: int  # completed by both
    faster: Mapping[str, Sides]  # by metric
    identical: bool  # True if nothing differs at all

    def line(self, metric: str, statistic: str) -> Line:
        return next(
            line for line in self.lines if (line.metric, line.statistic) == (metric, statistic)
        )

    def headlines(self) -> Iterator[Line]:
        """Yield the lines of the verdict: the mean and p99 of each latency, its p50 and p90 if they
        change more, and output tokens/s."""
        for metric in LATENCIES:
            mean, p50, p90, p99 = (self.line(metric, statistic.name) for statistic in STATISTICS)
            largest = max(mean.size, p99.size) + CLEARLY
            between = (line for line in (p50, p90) if line.measurable and line.size > largest)
            yield from (mean, *between, p99)
        yield self.line("output_rate", "")

    @property
    def verdict(self) -> str:
        """Return the main findings in plain words."""
        if not self.compared:
            return (
                f"{self.other} can't be compared with {self.base}: no request was completed by both"
            )
        if self.identical:
            return (
                f"{self.other} behaves exactly like {self.base}: no measurable difference, "
                f"every token came at the same time"
            )
        lines = list(self.headlines())
        found = [line.finding for line in lines if line.measurable]
        undecided = [line.bare for line in lines if line.change.measurable and not line.holds]
        same = [
            line for line in lines if not line.change.measurable and not math.isnan(line.change.low)
        ]
        bare = [
            line.bare
            for line in lines
            if math.isnan(line.change.low) and not math.isnan(line.change.a)
        ]
        parts = [", ".join(found)] if found else []
        if undecided:
            parts.append(f"{', '.join(undecided)}: these runs are too short to rule out chance")
        if same:
            parts.append(f"no measurable difference in {_listed(same)}")
        if bare:
            parts.append(f"{', '.join(bare)} (without an interval)")
        subject = f"{self.other} " if found else f"{self.other} against {self.base}: "
        return "; ".join((*self._served(), subject + "; ".join(parts)))

    def _served(self) -> tuple[str, ...]:
        """Return the finding, if any, that one completes fewer requests: its latencies don't cover
        those that it turned away."""
        if self.completed[0] == self.completed[1]:
            return ()
        base, other = (f"{100 * count / self.requests:.1f} %" for count in self.completed)
        return (
            f"{self.other} completes {other} of the requests, {self.base} {base}, and latencies "
            f"are of those that both completed",
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of all policies with the first."""

    names: tuple[str, ...]
    seeds: tuple[int, ...]
    method: Method
    versus: tuple[Versus, ...]

    @property
    def caution(self) -> str:
        """A caution about the number of intervals."""
        intervals = sum(
            not math.isnan(line.change.low) for versus in self.versus for line in versus.lines
        )
        by_chance = intervals * (1 - self.method.confidence)
        together = 1 - (1 - self.method.confidence) / max(intervals, 1)
        return (
            f"{intervals} intervals, each of {100 * self.method.confidence:g} %: without any "
            f"differences, about {by_chance:.1f} would still "
            f"exclude zero. For all to hold jointly: --confidence {together:.5f} (Bonferroni)."
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


def _listed(lines: Iterable[Line]) -> str:
    """Return the labels, those of one metric together: "mean and p99 TPOT, output tokens/s"."""
    metrics = (list(same) for _, same in groupby(lines, key=lambda line: line.metric))
    return ", ".join(
        f"{''.join(f'{line.statistic} and ' for line in same[:-1])}{same[-1].label}"
        for same in metrics
    )


def change_rows(lines: Sequence[Line]) -> Iterator[tuple[Line, list[str]]]:
    """Yield each line with its cells: before, after, the change and its interval."""
    for _, same in groupby(lines, key=lambda line: line.metric):
        of_metric = list(same)
        texts = iter(
            evenly([value for line in of_metric for value in (line.change.a, line.change.b)])
        )
        for line in of_metric:
            yield (
                line,
                [
                    next(texts),
                    next(texts),
                    signed_per_cent(line.change.relative),
                    _interval(line.change),
                ],
            )


def signed_per_cent(value: float) -> str:
    """Return a share as "+12.3 %", or a dash for NaN."""
    return MISSING if math.isnan(value) else f"{_tenths(value)} %"


def _interval(change: Change) -> str:
    return MISSING if math.isnan(change.low) else f"[{_tenths(change.low)}, {_tenths(change.high)}]"


def _tenths(share: float) -> str:
    """Return a signed percentage with one decimal; a value that rounds to zero has no sign."""
    tenths = round(100 * share, 1)
    return f"{tenths:+.1f}" if tenths else "0.0"
