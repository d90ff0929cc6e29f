"""`compare`: the changes from one policy to another on the same requests, with their certainty and a verdict in words.

Every policy gets the same trace, the same seeds and the same predictions of lengths; so requests can be paired. `statistics` has the intervals and
`docs/lab/compare.md` what they mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dovetail.errors import ConfigError
from dovetail_lab.metrics import measure, per_request
from dovetail_lab.records import RunResult
from dovetail_lab.statistics import (
    MEAN,
    MIN_SEEDS,
    P50,
    P90,
    P99,
    BlockDraws,
    Change,
    Draws,
    Pairs,
    SeedDraws,
    block_length,
    changes,
    scalar_change,
)

PAIRED = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E"}
STATISTICS = (MEAN, P50, P90, P99)
RATES = {"output_rate": "output tokens/s", "request_rate": "requests/s"}  # metrics with one number a run; more is better
HEADLINES = (("ttft", "p99"), ("ttft", "mean"), ("tpot", "p99"), ("e2e", "p99"), ("e2e", "mean"), ("output_rate", ""))


@dataclass(frozen=True, slots=True)
class Method:
    """The method by which the intervals were made."""

    draws: Draws
    confidence: float
    says: str  # the method in words
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Line:
    """One statistic of one metric; latencies in seconds."""

    metric: str
    statistic: str  # "" if the metric is one number a run
    change: Change

    @property
    def better(self) -> bool | None:
        """True if the change is for the better; None: no measurable difference."""
        return (self.change.relative < 0) == (self.metric in PAIRED) if self.change.measurable else None

    @property
    def outcome(self) -> str:
        """The outcome in words."""
        if math.isnan(self.change.low):
            return "no interval"
        return {True: "better", False: "worse", None: "no measurable difference"}[self.better]

    @property
    def label(self) -> str:
        return f"{self.statistic} {PAIRED[self.metric]}" if self.metric in PAIRED else RATES[self.metric]

    @property
    def finding(self) -> str:
        """The change in words: "cuts p99 TTFT by 31 % [27, 35]", or, if large, "makes p99 TTFT 3.1 times as much [2.8, 3.4]"."""
        change = self.change
        if change.relative > 1:
            digits = 2 if change.low >= 0.05 else 3  # an end near 1 mustn't be shown as 1, nor below as 0
            return f"makes {self.label} {1 + change.relative:.{digits}g} times as much [{1 + change.low:.{digits}g}, {1 + change.high:.{digits}g}]"
        verb, low, high = ("cuts", -change.high, -change.low) if change.relative < 0 else ("raises", change.low, change.high)
        digits = 0 if abs(change.relative) >= 0.1 and min(abs(low), abs(high)) >= 0.005 else 1
        return f"{verb} {self.label} by {100 * abs(change.relative):.{digits}f} % [{100 * low:.{digits}f}, {100 * high:.{digits}f}]"


class Sides(NamedTuple):
    """The shares of the requests completed by both for which the other is quicker, and slower; the rest are the same. NaN if there are none."""

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
        return next(line for line in self.lines if (line.metric, line.statistic) == (metric, statistic))

    @property
    def verdict(self) -> str:
        """Return the main findings in plain words."""
        if not self.compared:
            return f"{self.other} can't be compared with {self.base}: no request was completed by both"
        if self.identical:
            return f"{self.other} does what {self.base} does: no measurable difference, every token came at the same time"
        lines = [self.line(*headline) for headline in HEADLINES]
        found = [line.finding for line in lines if line.change.measurable]
        silent = [line.label for line in lines if not line.change.measurable and not math.isnan(line.change.low)]
        unsure = [f"{line.label} {_signed(line.change.relative)}" for line in lines if math.isnan(line.change.low) and line.change.relative]
        parts = [f"{self.other} {', '.join(found)}"] if found else []
        if silent and found:
            parts.append(f"{', '.join(silent)}: no measurable difference")
        elif silent:
            parts.append(f"{self.other} and {self.base}: no measurable difference in {', '.join(silent)}")
        if unsure:
            parts.append(f"{'' if parts else f'{self.other} against {self.base}: '}{', '.join(unsure)} (without an interval)")
        return "; ".join((*self._served(), *parts))

    def _served(self) -> tuple[str, ...]:
        """Return the finding, if any, that one completes fewer requests: its latencies don't cover those that it turned away."""
        if self.completed[0] == self.completed[1]:
            return ()
        base, other = (f"{100 * count / self.requests:.1f} %" for count in self.completed)
        return (f"{self.other} completes {other} of the requests, {self.base} {base}, and latencies are of those that both completed",)


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
        intervals = sum(not math.isnan(line.change.low) for versus in self.versus for line in versus.lines)
        by_chance = intervals * (1 - self.method.confidence)
        together = 1 - (1 - self.method.confidence) / max(intervals, 1)
        return (
            f"{intervals} intervals, each of {100 * self.method.confidence:g} %: were there no differences at all, about {by_chance:.1f} would still "
            f"leave out zero. For all to hold together: --confidence {together:.5f} (Bonferroni)."
        )


def compare(runs: Mapping[str, Sequence[RunResult]], *, resamples: int = 2_000, confidence: float = 0.95, seed: int = 0) -> Comparison:
    """Compare all policies with the first. `runs[name]` has one run for each seed, in the same order for all.

    Raises `ConfigError` unless there are two policies or more, each with the same requests in each run.
    """
    if len(runs) < 2:
        raise ConfigError(f"a comparison needs two policies or more, got {len(runs)}")
    check_settings(confidence, resamples)
    (base, base_runs), *others = runs.items()
    for name, other_runs in others:
        check_same_requests(base, base_runs, name, other_runs)
    pairs = {name: {metric: _paired(base_runs, other_runs, metric) for metric in PAIRED} for name, other_runs in others}
    every_pair = [pair for metrics in pairs.values() for run_pairs in metrics.values() for pair in run_pairs]
    method = _method(list(runs.values()), every_pair, resamples, confidence, seed)
    versus = tuple(_versus(base, base_runs, name, other_runs, pairs[name], method) for name, other_runs in others)
    return Comparison(tuple(runs), tuple(run.seed for run in base_runs), method, versus)


def check_settings(confidence: float, resamples: int) -> None:
    """Raise `ConfigError` for an invalid confidence, or for too few resamples to find percentiles."""
    if not 0.5 <= confidence < 1:
        raise ConfigError(f"--confidence: expected at least 0.5 and less than 1, got {confidence:g}")
    if resamples < 100:
        raise ConfigError(f"--resamples: expected 100 or more, got {resamples}")


def check_same_requests(base: str, base_runs: Sequence[RunResult], other: str, other_runs: Sequence[RunResult]) -> None:
    """Raise `ConfigError`, naming the first difference, unless the runs have the same requests."""
    if not base_runs or len(base_runs) != len(other_runs):
        raise ConfigError(f"{base} has {len(base_runs)} runs and {other} {len(other_runs)}: a comparison pairs run by run")
    for a, b in zip(base_runs, other_runs, strict=True):
        if a.seed != b.seed:
            raise ConfigError(f"a run of {base} has seed {a.seed}, its counterpart of {other} seed {b.seed}")
        if len(a) != len(b):
            raise ConfigError(f"{base} ran {len(a)} requests of {a.trace}, {other} ran {len(b)} of {b.trace}: not the same trace")
        for x, y in zip(a, b, strict=True):
            if _request(x) != _request(y):
                raise ConfigError(f"seed {a.seed}: request {x.id} of {base} isn't request {y.id} of {other}: not the same trace, or prediction")


def _request(record: object) -> tuple[object, ...]:
    names = ("id", "client", "arrival_s", "prompt_tokens", "true_tokens", "max_tokens", "predicted_tokens", "priority", "deadline_s")
    return tuple(getattr(record, name) for name in names)


def _paired(base: Sequence[RunResult], other: Sequence[RunResult], metric: str) -> list[Pairs]:
    return [Pairs(per_request(a, metric), per_request(b, metric)) for a, b in zip(base, other, strict=True)]


def _method(policies: Sequence[Sequence[RunResult]], pairs: Sequence[Pairs], resamples: int, confidence: float, seed: int) -> Method:
    """Choose what to draw: whole runs, if seeds give enough runs of different traffic; else blocks of consecutive requests."""
    runs, level = policies[0], f"{100 * confidence:g} % intervals: paired bootstrap, {resamples:,} resamples of "
    same_traffic = all(_traffic(run) == _traffic(runs[0]) for run in runs)
    if len(runs) >= MIN_SEEDS and not same_traffic:
        return Method(SeedDraws(len(runs), resamples, seed), confidence, f"{level}the {len(runs)} seeds' runs, each with traffic of its own")
    length = block_length(pairs, STATISTICS)
    requests = min(len(run) for run in runs)
    draws = BlockDraws(length.requests, requests, resamples, seed, same_traffic)
    if same_traffic and len(runs) > 1:
        reason = f"because all {len(runs)} seeds replay the same arrivals and lengths"
    else:
        reason = f"because {len(runs)} seed{'s are' if len(runs) > 1 else ' is'} too few to draw among ({MIN_SEEDS} or more do)"
    block = f"blocks of {length.requests} requests that follow each other" if length.requests > 1 else "single requests, which show no memory"
    says = f"{level}{block} ({draws.units} in a run), {reason}"
    warnings = {
        "the runs are too short for how long they remember, so intervals are too narrow: use a longer trace, or more seeds": length.capped,
        "every seed gave the same runs: one would do": len(runs) > 1
        and all(_alike(run, of_policy[0]) for of_policy in policies for run in of_policy),
    }
    return Method(draws, confidence, says, tuple(warning for warning, holds in warnings.items() if holds))


def _traffic(run: RunResult) -> list[tuple[float, int, int]]:
    return [(record.arrival_s, record.prompt_tokens, record.true_tokens) for record in run]


def _versus(
    base: str, base_runs: Sequence[RunResult], other: str, other_runs: Sequence[RunResult], pairs: Mapping[str, list[Pairs]], method: Method
) -> Versus:
    lines = []
    for metric, metric_pairs in pairs.items():
        found = changes(metric_pairs, STATISTICS, method.draws, method.confidence)
        lines += [Line(metric, statistic.name, change) for statistic, change in zip(STATISTICS, found, strict=True)]
    measured = [[measure(run) for run in runs] for runs in (base_runs, other_runs)]
    for rate in RATES:
        a, b = (np.array([getattr(metrics, rate) for metrics in side]) for side in measured)
        lines.append(Line(rate, "", scalar_change(a, b, method.draws, method.confidence)))
    return Versus(
        base,
        other,
        tuple(lines),
        requests=sum(map(len, base_runs)),
        completed=(sum(metrics.completed for metrics in measured[0]), sum(metrics.completed for metrics in measured[1])),
        compared=sum(int(pair.complete.sum()) for pair in pairs["ttft"]),
        faster={metric: _sides(metric_pairs) for metric, metric_pairs in pairs.items()},
        identical=all(_alike(a, b) for a, b in zip(base_runs, other_runs, strict=True)),
    )


def _alike(a: RunResult, b: RunResult) -> bool:
    """Return True if every token of every request came at the same time."""
    return len(a) == len(b) and all(
        np.array_equal(x.token_times_s, y.token_times_s) and x.finish_reason == y.finish_reason for x, y in zip(a, b, strict=True)
    )


def _sides(pairs: Sequence[Pairs]) -> Sides:
    gained = np.concatenate([(pair.a - pair.b)[pair.complete] for pair in pairs])
    return Sides(float((gained > 0).mean()), float((gained < 0).mean())) if len(gained) else Sides(math.nan, math.nan)


def _signed(relative: float) -> str:
    return f"{100 * relative:+.1f} %" if math.isfinite(relative) else "from nothing"
