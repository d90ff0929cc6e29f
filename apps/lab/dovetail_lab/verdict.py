"""`Comparison`: the result of a comparison of policies, and its findings in words. `compare` makes
it; `docs/lab/compare.md` explains it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from dovetail_lab.digits import MISSING, evenly
from dovetail_lab.draws import Draws
from dovetail_lab.pairs import MEAN, P50, P90, P99
from dovetail_lab.statistics import Change

LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"}
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
