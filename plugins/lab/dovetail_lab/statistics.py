"""The certainty of a comparison of two policies: paired bootstrap intervals for means and quantiles, on plain arrays.

Requests of one run are not independent: they share queues, batches and the KV pool. So no request is ever drawn alone. What is drawn, for both
policies alike, are whole runs where there are enough independent ones (`SeedDraws`), else stretches of time (`BlockDraws`). A change is the
logarithm of a ratio inside, so that exchanging the two policies negates it exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from scipy import special  # type: ignore[import-untyped]

Floats = npt.NDArray[np.float64]
Weights = npt.NDArray[np.int32 | np.int64]  # how often each request was drawn

MIN_SEEDS = 5  # below this, drawing among so few runs says nothing
MIN_BLOCKS = 7  # a block is at most this share of a run
_CELLS = 200_000  # weights made at once: what fits a processor's cache


@dataclass(frozen=True, slots=True)
class Statistic:
    """A mean, or a quantile with 0 < q < 1 by linear interpolation (numpy's default, and that of vLLM's `bench serve`)."""

    q: float | None = None

    @property
    def name(self) -> str:
        return "mean" if self.q is None else f"p{100 * self.q:g}"

    def of(self, values: Floats) -> float:
        """Return the statistic of the values; NaN if there are none."""
        if not len(values):
            return math.nan
        return float(np.mean(values) if self.q is None else np.quantile(values, self.q))

    def influence(self, values: Floats) -> Floats:
        """Return each value's influence (by the influence function), up to a constant factor: the series whose memory a block must span."""
        if self.q is None:
            mean = float(np.mean(values))
            return values / mean if mean else values
        return (values > np.quantile(values, self.q)).astype(np.float64)


MEAN, P50, P90, P99 = Statistic(), Statistic(0.5), Statistic(0.9), Statistic(0.99)


@dataclass(frozen=True, slots=True)
class Pairs:
    """One metric of the same requests under two policies in one run, in order of arrival: `a[i]` and `b[i]` are the same request. NaN where a
    policy left none; such a pair counts for neither."""

    a: Floats
    b: Floats

    def __post_init__(self) -> None:
        if self.a.shape != self.b.shape or self.a.ndim != 1:
            raise ValueError(f"pairs need two arrays [requests] of one length, got {self.a.shape} and {self.b.shape}")

    @property
    def complete(self) -> npt.NDArray[np.bool_]:
        return np.isfinite(self.a) & np.isfinite(self.b)

    def reversed(self) -> Pairs:
        return Pairs(self.b, self.a)


@dataclass(frozen=True, slots=True)
class Change:
    """From `a` to `b`, each the mean over runs of a run's statistic; `relative`, `low` and `high` are shares: -0.31 is 31 % less. `low` and
    `high` are NaN where no interval can be had."""

    a: float
    b: float
    relative: float
    low: float
    high: float

    @property
    def measurable(self) -> bool:
        """True if the interval excludes zero."""
        return self.low > 0 or self.high < 0


class Draws(Protocol):
    """A way to resample both policies' runs together."""

    @property
    def units(self) -> int:
        """Independent things that are drawn among; the fewer, the wider the interval."""

    def logs(self, runs: Sequence[Pairs], statistics: Sequence[Statistic]) -> Floats:
        """log(b / a) of each statistic in each resample: [statistics, resamples]."""


@dataclass(frozen=True, slots=True)
class SeedDraws:
    """Whole runs, each an independent replication, drawn with replacement."""

    seeds: int
    resamples: int
    seed: int

    @property
    def units(self) -> int:
        return self.seeds

    def logs(self, runs: Sequence[Pairs], statistics: Sequence[Statistic]) -> Floats:
        return np.stack([self.of_scalars(*_per_run(runs, statistic)) for statistic in statistics])

    def of_scalars(self, a: Floats, b: Floats) -> Floats:
        """Resample metrics with one number a run: a[run], b[run]."""
        drawn = np.random.default_rng(self.seed).integers(0, self.seeds, (self.resamples, self.seeds))
        return _log_ratio(a[drawn].mean(axis=1), b[drawn].mean(axis=1))


@dataclass(frozen=True, slots=True)
class BlockDraws:
    """Stretches of `length` requests that follow each other, drawn with replacement from each run, the run taken as a circle (Politis and Romano
    1992, "A circular block-resampling procedure for stationary data"). `same_traffic`: the runs hold the same requests, so one draw serves all."""

    length: int
    requests: int  # in a run
    resamples: int
    seed: int
    same_traffic: bool = False

    @property
    def units(self) -> int:
        return max(1, self.requests // self.length)

    def logs(self, runs: Sequence[Pairs], statistics: Sequence[Statistic]) -> Floats:
        total = np.zeros((2, len(statistics), self.resamples))
        for index, run in enumerate(runs):
            seed = self.seed if self.same_traffic else [self.seed, index]
            keep, done = np.flatnonzero(run.complete), 0
            sides = [Ranked.of(run.a[keep]), Ranked.of(run.b[keep])]
            for weights in self._weights(len(run.a), np.random.default_rng(seed)):
                span = slice(done, done + len(weights))
                for side, ranked in enumerate(sides):
                    total[side, :, span] += ranked.statistics(weights[:, keep[ranked.order]], statistics)
                done = span.stop
        return _log_ratio(total[0], total[1])

    def _weights(self, requests: int, rng: np.random.Generator) -> Iterator[Weights]:
        """Yield how often each request of a run was drawn, some resamples at a time."""
        length = max(1, min(self.length, requests))
        blocks = math.ceil(requests / length)
        at_once = max(1, _CELLS // max(1, requests))
        for begin in range(0, self.resamples, at_once):
            rows = min(at_once, self.resamples - begin)
            starts = rng.integers(0, requests, (rows, blocks))
            steps = np.zeros((rows, 2 * requests + 1), np.int32)
            row = np.arange(rows)[:, None]
            np.add.at(steps, (row, starts), 1)
            np.add.at(steps, (row, starts + length), -1)
            counts = np.cumsum(steps[:, :-1], axis=1, dtype=np.int32)
            yield counts[:, :requests] + counts[:, requests:]


@dataclass(frozen=True, slots=True)
class Ranked:
    """Values in rising order, so that any quantile of any draw of them is a look-up."""

    values: Floats
    order: npt.NDArray[np.intp]

    @classmethod
    def of(cls, values: Floats) -> Ranked:
        order = np.argsort(values, kind="stable")
        return cls(values[order], order)

    def statistics(self, weights: Weights, statistics: Sequence[Statistic]) -> Floats:
        """[statistics, draws] of the values, the i-th smallest drawn `weights[draw, i]` times: as `Statistic.of` has it of the values repeated so
        often, NaN where none was drawn."""
        reached = np.cumsum(weights, axis=1, dtype=np.int32)
        total = reached[:, -1] if len(self.values) else np.zeros(len(weights), np.int64)
        found = [self._mean(weights, total) if s.q is None else self._quantile(reached, total, s.q) for s in statistics]
        return np.where(total > 0, np.stack(found), math.nan)

    def _mean(self, weights: Weights, total: Weights) -> Floats:
        return np.asarray(weights @ self.values / np.maximum(total, 1), np.float64)

    def _quantile(self, reached: Weights, total: Weights, q: float) -> Floats:
        if not len(self.values):
            return np.zeros(len(total))
        position = q * np.maximum(total - 1, 0)
        below = np.floor(position)
        above = np.minimum(below + 1, np.maximum(total - 1, 0))
        at = np.array([np.searchsorted(row, pair, side="right") for row, pair in zip(reached, zip(below, above, strict=True), strict=True)])
        low, high = self.values[np.minimum(at, len(self.values) - 1)].T
        return np.asarray(low + (position - below) * (high - low), np.float64)


def changes(runs: Sequence[Pairs], statistics: Sequence[Statistic], draws: Draws, confidence: float = 0.95) -> list[Change]:
    """The change of each statistic from a to b over all runs, with its interval."""
    logs = draws.logs(runs, statistics)
    return [_change(*_per_run(runs, statistic), logs[index], draws.units, confidence) for index, statistic in enumerate(statistics)]


def scalar_change(a: Floats, b: Floats, draws: Draws, confidence: float = 0.95) -> Change:
    """Return the change of a metric with one number a run. Only drawing whole runs gives it an interval."""
    logs = draws.of_scalars(a, b) if isinstance(draws, SeedDraws) else np.full(1, math.nan)
    return _change(a, b, logs, draws.units, confidence)


def _change(a_of_runs: Floats, b_of_runs: Floats, logs: Floats, units: int, confidence: float) -> Change:
    a, b = float(np.mean(a_of_runs)), float(np.mean(b_of_runs))
    centre = float(_log_ratio(np.array([a]), np.array([b]))[0])
    relative = math.expm1(centre) if math.isfinite(centre) else math.nan
    if not np.isfinite(logs).all() or units < 2:
        return Change(a, b, relative, math.nan, math.nan)
    tail = (1 - confidence) / 2
    low, high = np.expm1(centre + _widening(confidence, units) * (np.quantile(logs, [tail, 1 - tail]) - centre))
    return Change(a, b, relative, float(low), float(high))


def _widening(confidence: float, units: int) -> float:
    """A percentile bootstrap of n units is too narrow: by sqrt((n - 1) / n), and by using the normal's quantile where Student's t is due
    (Hesterberg 2015, "What teachers should know about the bootstrap", section 5.3)."""
    level = (1 + confidence) / 2
    return math.sqrt(units / (units - 1)) * float(special.stdtrit(units - 1, level) / special.ndtri(level))


def _per_run(runs: Sequence[Pairs], statistic: Statistic) -> tuple[Floats, Floats]:
    kept = [(run.a[run.complete], run.b[run.complete]) for run in runs]
    return np.array([statistic.of(a) for a, _ in kept]), np.array([statistic.of(b) for _, b in kept])


def _log_ratio(a: Floats, b: Floats) -> Floats:
    """Return log(b / a): 0 if both are equal, also both 0; not finite if only one is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(a == b, 0.0, np.log(b) - np.log(a))


@dataclass(frozen=True, slots=True)
class BlockLength:
    """`capped`: the run remembers for longer than it has room for `MIN_BLOCKS` blocks, so intervals are too narrow."""

    requests: int
    capped: bool


def block_length(runs: Sequence[Pairs], statistics: Sequence[Statistic]) -> BlockLength:
    """Long enough for every statistic of every run: twice the longest of their optimal lengths. Those are optimal for a variance; in
    an interval their bias weighs more, and blocks twice as long come nearer the stated level (`tests/lab/test_statistics.py` draws for it)."""
    longest, shortest_run = 1, min((len(run.a) for run in runs), default=1)
    for run in runs:
        a, b = run.a[run.complete], run.b[run.complete]
        for statistic in statistics if len(a) else ():
            optimal = optimal_block(statistic.influence(b) - statistic.influence(a))
            longest = max(longest, 2 * optimal if optimal > 1 else 1)
    limit = max(1, shortest_run // MIN_BLOCKS)
    return BlockLength(min(longest, limit), longest > limit)


def optimal_block(series: Floats) -> int:
    """The block length that makes the circular block bootstrap's variance of a mean most exact: Politis and White 2004, "Automatic block-length
    selection for the dependent bootstrap", as corrected by Patton, Politis and White 2009; m is their smallest lag after which the
    autocorrelations stay insignificant, and lambda their flat-top window."""
    n = len(series)
    covariance = _autocovariance(series)
    if n < 8 or covariance[0] <= 0:
        return 1
    run_of_small = max(5, math.ceil(math.sqrt(math.log10(n))))
    small = np.abs(covariance[1:] / covariance[0]) < 2 * math.sqrt(math.log10(n) / n)
    m = next((lag for lag in range(len(small) - run_of_small) if small[lag : lag + run_of_small].all()), len(small) // 2)
    lags = np.arange(-min(2 * max(m, 1), n - 1), min(2 * max(m, 1), n - 1) + 1)
    window = np.clip(2 * (1 - np.abs(lags) / (2 * max(m, 1))), 0, 1)
    near = covariance[np.abs(lags)]
    spectrum, slope = float(window @ near), float(window @ (np.abs(lags) * near))
    if spectrum <= 0:
        return 1
    return max(1, math.ceil(math.cbrt(2 * slope**2 / (4 / 3 * spectrum**2) * n)))


def _autocovariance(series: Floats) -> Floats:
    """Return the autocovariance at lags 0 .. n - 1, by the Fourier transform."""
    n = len(series)
    if n == 0:
        return np.zeros(1)
    spectrum = np.fft.rfft(series - series.mean(), 2 * n)
    return np.asarray(np.fft.irfft(spectrum * spectrum.conj(), 2 * n)[:n] / n, np.float64)
